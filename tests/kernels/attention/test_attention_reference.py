"""The sharing of gathers and masks among rows in CPU serving does not affect its results."""

import pytest

from kernels.attention import reference as attention_reference
from tests.kernels.attention.attention_case import Case


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    monkeypatch.setattr("kernels.device.uses_triton", lambda tensor: False)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 50, 1000])
def test_chunks_of_more_queries_than_share_a_mask(page_size, window):
    Case([(300, 310), (1, 100), (2, 31)], page_size=page_size).check(window)


@pytest.mark.parametrize("group_bytes", [1, 3000, 9000])
def test_rows_agree_however_they_are_grouped(monkeypatch, group_bytes):
    monkeypatch.setattr(attention_reference, "GROUP_BYTES", group_bytes)
    case = Case([(1, 40), (1, 3), (1, 17), (1, 64), (1, 16)])
    case.check()
    case.check(20)

"""Bitmasks, compared with bits that numpy unpacked."""

import numpy as np
import pytest
import torch

from kernels.sampling.bitmask import FORBIDDEN, apply_bitmask
from kernels.sampling.sample import sample
from tests.kernels.conftest import DEVICE, check_refused
from tests.kernels.sampling.test_sampling import columns


@pytest.mark.parametrize(
    "vocabulary", [1, 31, 64, 4099, pytest.param(151936, marks=pytest.mark.gpu)]
)
def test_only_tokens_whose_bit_is_0_become_forbidden(vocabulary, implementation):
    m = 64 if vocabulary > 100_000 else 2
    wide = torch.randn(m + 2, vocabulary + 40)
    rows = torch.randperm(m + 2)[:m]
    bitmask = torch.randint(-(2**31), 2**31, (m, -(-vocabulary // 32))).int()
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")
    expected = wide.clone()
    for row, line in zip(rows.tolist(), bits, strict=True):
        expected[row, np.flatnonzero(line[:vocabulary] == 0)] = FORBIDDEN
    masked = wide.clone().to(DEVICE)
    apply_bitmask(masked[:, :vocabulary], rows.to(DEVICE), bitmask.to(DEVICE))
    assert torch.equal(masked.cpu(), expected)


FILTERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-3},
    {"top_k": 5},  # more than are allowed
    {"top_p": 0.9},
    {"top_k": 200, "top_p": 0.99, "min_p": 0.01},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_masked_row_samples_only_allowed_tokens(implementation, filters):
    """Seen failing with -inf for forbidden tokens, which is also the result of a failed forward."""
    allowed = {3, 40, 130}
    logits = torch.randn(6, 200, device=DEVICE)
    logits[:, sorted(allowed)] -= 50.0  # the least likely of all
    words = np.zeros((6, 7), np.uint32)
    for token in allowed:
        words[:, token // 32] |= np.uint32(1 << token % 32)
    bitmask = torch.from_numpy(words.view(np.int32)).to(DEVICE)
    apply_bitmask(logits, torch.arange(6, device=DEVICE), bitmask)
    assert set(sample(logits, columns(6, **filters)).tolist()) <= allowed


def test_no_rows_change_nothing(implementation):
    logits = torch.zeros(2, 40, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    apply_bitmask(logits, none, torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
    assert not logits.any()


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    logits, row = torch.zeros(2, 40), torch.tensor([0])
    bitmask = torch.zeros(1, 2, dtype=torch.int32)
    check_refused("float32", apply_bitmask, logits.half(), row, bitmask)
    check_refused(r"\(1, 2\) expected", apply_bitmask, logits, row, bitmask[:, :1])
    check_refused(r"\(1, 2\) expected", apply_bitmask, logits, row, bitmask.long())
    check_refused("rows", apply_bitmask, logits, torch.tensor([0, 0, 1])[::2], bitmask.repeat(2, 1))

"""The tokens of a prompt that one forward takes, and the pages that requests will need to grow."""

import pytest

from engine.scheduler.admission import PrefillAdder
from engine.scheduler.running import NewTokenRatio, missing_pages, missing_pages_of_one
from tests.support.engine.engine_rig import ints


@pytest.mark.parametrize(
    "limits, start, end, cut",
    [((1000, 3), 32, 500, 48), ((1000, 0), 32, 37, 37), ((1, None), 0, 500, 500)],
)
def test_the_first_row_always_makes_progress(limits, start, end, cut):
    tokens, chunk = limits
    adder = PrefillAdder(page_size=16, reserved_pages=0, input_tokens=tokens, chunk_tokens=chunk)
    assert adder.cut(start, end) == cut


@pytest.mark.parametrize("ratio", [0.098, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("room", [-1, 0, 3])
def test_growth_of_many_is_the_sum_of_the_growth_of_each(ratio, length, room):
    rows = [(length, length + more, length + room) for more in (0, 1, 2, 40, 10000)]
    each = [missing_pages_of_one(*row, ratio, 16) for row in rows]
    columns = [ints(column) for column in zip(*rows, strict=True)]
    assert missing_pages(*columns, ratio, 16).tolist() == each


def test_a_running_request_with_full_pages_counts_a_page_for_any_ratio():
    assert missing_pages_of_one(17, 18, 16, 0.001, 16) == 1
    assert missing_pages_of_one(17, 17, 16, 1.0, 16) == 0


def test_growth_is_limited_and_the_last_token_needs_no_page():
    assert missing_pages_of_one(16, 10**6, 16, 1.0, 16) == 4096 // 16
    assert missing_pages_of_one(16, 33, 16, 1.0, 16) == 1


def test_the_ratio_decays_to_its_minimum_rises_after_a_retraction_and_resets():
    ratio = NewTokenRatio(0.7, 0.1, 10)
    for _ in range(5):
        ratio.decay()
    assert ratio.value == pytest.approx(0.4)
    for _ in range(20):
        ratio.decay()
    assert ratio.value == pytest.approx(0.1)
    ratio.raise_after_retraction(generated=300, max_new=1000, num_requests=10)
    assert ratio.value == pytest.approx((300 + 20 * 10) / 1001)
    ratio.raise_after_retraction(generated=990, max_new=1000, num_requests=10)
    assert ratio.value == 1.0
    ratio.reset()
    assert ratio.value == 0.7

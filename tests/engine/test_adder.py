import pytest

from engine.scheduler.admission import PrefillAdder
from engine.scheduler.running import NewTokenRatio, missing_pages, missing_pages_of_one
from tests.support.engine_rig import ints


def _adder(*, reserved: int = 0, tokens: int = 1000, chunk: int | None = None) -> PrefillAdder:
    return PrefillAdder(
        page_size=16, reserved_pages=reserved, input_tokens=tokens, chunk_tokens=chunk
    )


def test_pages_reserved_for_growth_are_not_given_away():
    adder = _adder(reserved=4)
    assert adder.has_room(6, available=10)
    assert not adder.has_room(7, available=10)
    adder.reserve(2)
    assert not adder.has_room(6, available=10)


def test_a_prompt_within_the_budgets_is_not_cut():
    assert _adder(chunk=64).cut(0, 64) == 64
    assert _adder().cut(16, 900) == 900


def test_a_prompt_is_cut_at_a_page_boundary_of_what_the_chunk_has_left():
    adder = _adder(chunk=100)
    assert adder.cut(0, 30) == 30
    assert adder.cut(16, 500) == 16 + 64
    assert adder.cut(0, 500) == 0


def test_the_first_row_always_gets_something_done():
    assert _adder(chunk=3).cut(32, 500) == 48
    assert _adder(chunk=0).cut(32, 37) == 37
    assert _adder(tokens=1).cut(0, 500) == 500


def test_a_further_prompt_must_fit_the_input_tokens():
    adder = _adder(tokens=100)
    assert adder.cut(0, 60) == 60
    assert adder.cut(0, 41) == 0
    assert adder.cut(0, 40) == 40


@pytest.mark.parametrize("ratio", [0.098, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("room", [-1, 0, 3])
def test_growth_of_many_is_the_growth_of_each(ratio, length, room):
    rows = [(length, length + more, length + room) for more in (0, 1, 2, 40, 10000)]
    each = [missing_pages_of_one(*row, ratio, 16) for row in rows]
    columns = [ints(column) for column in zip(*rows, strict=True)]
    assert missing_pages(*columns, ratio, 16).tolist() == each


def test_a_request_that_goes_on_with_full_pages_counts_a_page_however_small_the_ratio():
    assert missing_pages_of_one(17, 18, 16, 0.001, 16) == 1
    assert missing_pages_of_one(17, 17, 16, 1.0, 16) == 0


def test_growth_is_clipped_and_the_last_token_needs_no_room():
    assert missing_pages_of_one(16, 10**6, 16, 1.0, 16) == 4096 // 16
    assert missing_pages_of_one(16, 33, 16, 1.0, 16) == 1


def test_the_ratio_decays_to_its_end_jumps_after_a_retraction_and_starts_anew():
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

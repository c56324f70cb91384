"""A rate limit against the plainest account of it: a bucket filled by the clock."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth.client import TokenBucket
from tests.support.fake_clock import FakeClock

SECOND = 10**9


def test_a_minutes_worth_is_there_at_once_and_then_as_many_as_time_brings():
    clock = FakeClock(123_456_789)
    bucket = TokenBucket(3, clock)
    for _ in range(3):
        assert bucket.wait_s(1) == 0
        bucket.take(1)
    assert bucket.wait_s(1) == pytest.approx(20)
    clock.now += 20 * SECOND - 1
    assert bucket.wait_s(1) > 0
    clock.now += 1
    assert bucket.wait_s(1) == 0


def test_what_was_taken_too_much_comes_in_first():
    clock = FakeClock(123_456_789)
    bucket = TokenBucket(60, clock)
    bucket.take(60 + 30)
    assert (bucket.remaining, bucket.wait_s(1)) == (0, pytest.approx(31))
    clock.now += 31 * SECOND
    assert (bucket.remaining, bucket.wait_s(1)) == (1, 0)
    assert bucket.full_in_s == pytest.approx(59)


@given(
    per_minute=st.integers(1, 10**7),
    events=st.lists(st.tuples(st.integers(0, 10**11), st.integers(1, 10**7)), max_size=30),
)
def test_it_counts_exactly(per_minute, events):
    clock = FakeClock(123_456_789)
    bucket = TokenBucket(per_minute, clock)
    level = Fraction(per_minute)
    for passed, number in events:
        clock.now += passed
        level = min(level + Fraction(passed * per_minute, 60 * SECOND), Fraction(per_minute))
        number = min(number, per_minute)
        assert bucket.remaining == max(level.numerator // level.denominator, 0)
        assert (bucket.wait_s(number) == 0) == (level >= number)
        bucket.take(number)
        level -= number

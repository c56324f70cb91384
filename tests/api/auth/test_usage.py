"""Rate limits of one key per minute: requests before any work, tokens as they are counted."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth.api_keys import KeyLimits
from api.auth.client import KeyUsage, TokenBucket
from common.errors import InvalidRequest, RateLimited
from tests.support.fake_clock import FakeClock

SECOND = 10**9


@pytest.fixture
def clock():
    return FakeClock(0)


def later(take: Callable[..., None], *numbers: int, words: str) -> float:
    """Return the seconds after which a request may come that is refused now with these words."""
    with pytest.raises(RateLimited, match=words) as refused:
        take(*numbers)
    return refused.value.retry_after_s


def test_requests_that_come_together_are_counted_together_or_not_at_all(clock):
    usage = KeyUsage(KeyLimits(requests_per_minute=6), clock)
    usage.begin(4)
    assert later(usage.begin, 3, words="6 requests a minute") == pytest.approx(10)
    usage.begin(2)
    assert (usage.num_requests, usage.num_refused) == (6, 1)


def test_what_is_never_allowed_is_not_told_to_come_again(clock):
    usage = KeyUsage(KeyLimits(requests_per_minute=2, tokens_per_minute=100), clock)
    with pytest.raises(InvalidRequest, match="3 requests at once"):
        usage.begin(3)
    with pytest.raises(InvalidRequest, match="prompt has 101 tokens"):
        usage.prompts(101)


def test_a_prompt_that_does_not_fit_now_is_told_when_it_will(clock):
    usage = KeyUsage(KeyLimits(tokens_per_minute=120), clock)
    usage.prompts(100)
    assert later(usage.prompts, 40, words="120 tokens a minute") == pytest.approx(10)
    clock.now += 10 * SECOND
    usage.prompts(40)


# Seen failing with the wait for tokens alone.
def test_who_has_neither_tokens_nor_requests_is_told_when_there_are_both(clock):
    usage = KeyUsage(KeyLimits(requests_per_minute=2, tokens_per_minute=60), clock)
    usage.begin(2)
    usage.prompts(30, 2)
    assert later(usage.prompts, 40, 2, words="60 tokens a minute") == pytest.approx(60)
    clock.now += 60 * SECOND
    usage.begin(2)
    usage.prompts(40, 2)
    usage.generated(21)
    assert later(usage.begin, 2, words="60 tokens a minute") == pytest.approx(60)


def test_generated_tokens_count_and_the_next_request_pays_before_any_work(clock):
    usage = KeyUsage(KeyLimits(tokens_per_minute=60), clock)
    usage.begin()
    usage.prompts(50)
    usage.generated(40)
    assert later(usage.begin, words="60 tokens a minute") == pytest.approx(31)
    clock.now += 31 * SECOND
    usage.begin()


def test_a_changed_limit_holds_at_once_and_one_that_stays_is_as_used_up_as_it_was(clock):
    usage = KeyUsage(KeyLimits(requests_per_minute=1, tokens_per_minute=10), clock)
    usage.begin()
    usage.prompts(10)
    usage.limit(KeyLimits(requests_per_minute=1, tokens_per_minute=20))
    usage.prompts(20)
    usage.limit(KeyLimits(requests_per_minute=1))
    with pytest.raises(RateLimited, match="1 requests a minute"):
        usage.begin()


def test_clients_are_told_what_they_have_left(clock):
    usage = KeyUsage(KeyLimits(requests_per_minute=60, tokens_per_minute=600), clock)
    usage.begin()
    usage.prompts(100)
    assert dict(usage.headers()) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10.000s",
    }
    assert dict(KeyUsage(KeyLimits(), clock).headers()) == {}


# The bucket ---------------------------------------------------------------------------------------


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

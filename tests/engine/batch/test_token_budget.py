"""The limit of all waiting tokens."""

import pytest

from common.errors import Overloaded
from engine.batch.limits import TokenBudget


def test_tokens_are_accepted_up_to_the_limit_and_released_once() -> None:
    held = TokenBudget(10)
    held.take(1, 6)
    held.take(2, 4)
    with pytest.raises(Overloaded, match=r"queue is full \(10 of"):
        held.take(3, 1)
    held.drop(3)  # it has none
    held.drop(1)
    held.drop(1)
    held.take(3, 6)


def test_a_single_request_may_exceed_the_limit() -> None:
    held = TokenBudget(10)
    held.take(1, 50)
    held.drop(1)
    held.take(2, 50)


def test_some_requests_may_use_several_times_the_limit_together_with_all_others() -> None:
    held = TokenBudget(10)
    held.take(1, 10)
    held.take(2, 10, times=2)
    with pytest.raises(Overloaded, match=r"queue is full \(20 of 20 tokens\)"):
        held.take(3, 1, times=2)

"""Tokens that wait, in all."""

import pytest

from common.errors import Overloaded
from engine.batch.limits import TokenBudget


def test_tokens_are_taken_until_there_is_no_room_and_given_back_once() -> None:
    held = TokenBudget(10)
    held.take(1, 6)
    held.take(2, 4)
    with pytest.raises(Overloaded, match=r"queue is full \(10 of"):
        held.take(3, 1)
    held.drop(3)  # it has none
    held.drop(1)
    held.drop(1)
    held.take(3, 6)


def test_a_single_request_may_have_more_than_all_may() -> None:
    held = TokenBudget(10)
    held.take(1, 50)
    held.drop(1)
    held.take(2, 50)


def test_some_may_have_several_times_as_much_together_with_all_others() -> None:
    held = TokenBudget(10)
    held.take(1, 10)
    held.take(2, 10, times=2)
    with pytest.raises(Overloaded, match=r"queue is full \(20 of 20 tokens\)"):
        held.take(3, 1, times=2)

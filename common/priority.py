"""How urgent a request is beside others: an integer, the higher the sooner.

A step of it counts as so many seconds of waiting. In every queue a request goes before those that
came no more than that earlier, and after those that came earlier still: so what is urgent hardly
waits, and what is not waits longer, but not for ever.
"""

from typing import Literal, TypeAlias, get_args

LOWEST, HIGHEST = -100, 100
STEP_S = 10.0

PriorityClass: TypeAlias = Literal["low", "normal", "high"]  # below, at and above 0: for metrics
CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)


def head_start_s(priority: int) -> float:
    """By how much one goes before others that came when it did."""
    return priority * STEP_S


def class_of(priority: int) -> PriorityClass:
    return CLASSES[(priority > 0) - (priority < 0) + 1]

"""Request priorities: integers, higher is more urgent.

Each step of priority counts as STEP_S seconds of queue time. A request with an advantage of n
seconds goes before requests that arrived up to n seconds earlier, and after older ones. So urgent
requests hardly wait, and others wait longer but do not starve.
"""

from typing import Literal, TypeAlias, get_args

LOWEST, HIGHEST = -100, 100
STEP_S = 10.0

PriorityClass: TypeAlias = Literal["low", "normal", "high"]  # below, at and above 0, for metrics
CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)


def head_start_s(priority: int) -> float:
    """Return the advantage of a priority, in seconds of queue time."""
    return priority * STEP_S


def class_of(priority: int) -> PriorityClass:
    return CLASSES[(priority > 0) - (priority < 0) + 1]

"""The planner inside a simulation in virtual time."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cli.operating import command
from cli.planner.__main__ import parse, plan
from cli.planner.metrics import PlannerMetrics


def planner(flags: Sequence[str], router: str) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a planner that acts until it is cancelled. Exits if a flag is invalid."""
    options = parse([*flags, "--act", f"--router={router}"])

    async def run() -> None:
        await command.with_fleet(
            options, lambda options, fleet: plan(options, PlannerMetrics(), fleet)
        )

    return run

"""The program of `baton sim`. It replaces the clocks before it imports what reads them."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from simulation.virtual.clock import VirtualClock, seed_all

_USAGE = "usage: python -m simulation.virtual FILE text|json"


def main(load_planner: Callable[[], Any] = lambda: None) -> int:
    """Run the scenario of the command line. Returns the exit code.

    Args:
        load_planner: called after the clocks are replaced. Returns what makes the planner of a
            scenario, see MakePlanner.
    """
    if len(sys.argv) != 3 or sys.argv[2] not in ("text", "json"):
        print(_USAGE, file=sys.stderr)
        return 2
    clock = VirtualClock()
    clock.install()
    scenarios, running, reports = (
        import_module(f"simulation.virtual.{name}") for name in ("scenario", "run", "report")
    )
    config_error = import_module("common.errors").ConfigError
    deadlock = import_module("simulation.virtual.loop").Deadlock
    try:
        scenario = scenarios.read(Path(sys.argv[1]))
        seed_all(scenario.seed)
        report = running.run(scenario, clock, load_planner())
    except (ValueError, config_error) as error:
        print(f"baton sim: {error}", file=sys.stderr)
        return 2
    except deadlock as error:
        print(f"baton sim: this is a bug: {error}", file=sys.stderr)
        return 1
    if sys.argv[2] == "json":
        print(json.dumps(import_module("msgspec").to_builtins(report), indent=2))
    else:
        print("\n".join(reports.lines(report)))
    return int(report.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The process of `baton sim`. It replaces the clocks before it imports modules that read them."""

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from simulation.virtual.clock import VirtualClock, seed_all

_USAGE = """usage: python -m simulation.virtual FILE text|json
       python -m simulation.virtual --chaos SEED SEEDS text|json"""


def main(load_planner: Callable[[], Any] = lambda: None) -> int:
    """Run the scenarios of the command line. Returns the exit code.

    Args:
        load_planner: called after the clocks are replaced. Returns a MakePlanner.
    """
    clock = VirtualClock()
    clock.install()
    match sys.argv[1:]:
        case [file, "text" | "json" as form]:
            return _run_file(Path(file), clock, form, load_planner)
        case ["--chaos", first, number, "text" | "json" as form]:
            return _run_chaos(int(first), int(number), clock, form, load_planner)
        case _:
            print(_USAGE, file=sys.stderr)
            return 2


def _run_file(file: Path, clock: VirtualClock, form: str, load_planner: Callable[[], Any]) -> int:
    scenarios, running, reports = (
        import_module(f"simulation.virtual.{name}") for name in ("scenario", "run", "report")
    )
    config_error = import_module("common.errors").ConfigError
    deadlock = import_module("simulation.virtual.loop").Deadlock
    try:
        scenario = scenarios.read(file)
        seed_all(scenario.seed)
        report = running.run(scenario, clock, load_planner())
    except (ValueError, config_error) as error:
        print(f"baton sim: {error}", file=sys.stderr)
        return 2
    except deadlock as error:
        print(f"baton sim: this is a bug: {error}", file=sys.stderr)
        return 1
    _print(report, reports, form)
    return int(bool(report.violations))


def _run_chaos(
    first: int, number: int, clock: VirtualClock, form: str, load_planner: Callable[[], Any]
) -> int:
    chaos = import_module("simulation.virtual.chaos")

    def on_outcome(seed: int, outcome: Any) -> None:
        result = "failed, is reduced" if outcome.violations else f"hash {outcome.hash}"
        print(f"seed {seed}: {result}", file=sys.stderr)

    run_one = partial(chaos.outcome_of, clock, load_planner())
    report = chaos.search(first, number, run_one, on_outcome)
    _print(report, chaos, form)
    return int(bool(report.failures))


def _print(report: Any, module: Any, form: str) -> None:
    if form == "json":
        print(json.dumps(import_module("msgspec").to_builtins(report), indent=2))
    else:
        print("\n".join(module.lines(report)))


if __name__ == "__main__":
    sys.exit(main())

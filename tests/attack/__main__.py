"""`python -m tests.attack --minutes M --seed S`: attack a system on this machine and report the
outcome. `make attack` is the same."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from tests.attack.arm import ARMS
from tests.attack.siege import Report, siege


def main() -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--arms", default=",".join(ARMS), help="which arms attack")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="baton-attack-"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(siege(seed, 60.0 * options.minutes, directory, options.arms.split(",")))
    _print_report(report, directory)
    return 1 if report.complaints else 0


def _print_report(report: Report, directory: Path) -> None:
    for arm, counts in report.moves.items():
        moves = ", ".join(f"{number} {name}" for name, number in counts.items())
        print(f"{arm}: {moves}")
    for process in report.processes:
        sizes = f"{process.before_bytes >> 20} -> {process.after_bytes >> 20} MiB"
        print(f"{process.name}: {sizes}, {process.growth:+.1%}")
    print(
        f"{report.num_right} right answers, p50 {report.p50_s:.2f} s, p99 {report.p99_s:.2f} s "
        f"(undisturbed {report.calm_p99_s:.2f} s)"
    )
    for delay in report.delays:
        print(
            f"beside {delay.arm} alone: p99 of short answers {1e3 * delay.p99_s:.0f} ms of "
            f"{delay.num_disturbed} (undisturbed {1e3 * delay.calm_p99_s:.0f} ms of "
            f"{delay.num_calm})"
        )
    for complaint in report.complaints:
        print(f"WRONG: {complaint}")
    print(f"logs: {directory}")
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    sys.exit(main())

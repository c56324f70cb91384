"""`python -m tests.chaos --minutes M --seed S`: a system on this machine serves a checked load,
while one fault after the other is injected. `make chaos` is the same."""

import argparse
import asyncio
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from tests.chaos.faults import rounds
from tests.chaos.page import write_page
from tests.chaos.site import NUM_NODES
from tests.chaos.storm import storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--report", type=Path, default=Path("var/chaos.html"), metavar="FILE")
    parser.add_argument(
        "--ranks", action="store_true", help="prefill nodes and one decode node have two ranks"
    )
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plan = rounds(seed, NUM_NODES, ranks=options.ranks)
        going = _for(60.0 * options.minutes)
        report = runner.run(storm(seed, plan, going, directory, ranks=options.ranks))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    write_page(report, options.report)
    print(f"{len(report.rounds)} rounds, {report.num_right} right answers")
    for each in report.broken:
        print(f"asked again: {each}")
    for complaint in report.complaints:
        print(f"WRONG: {complaint}")
    print(f"report: {options.report}, logs: {directory}")
    print(msgspec.json.encode(report).decode())
    return 1 if report.complaints else 0


def _for(seconds: float) -> Callable[[], bool]:
    """Return true for this duration from the first call on. Until then, processes are being
    started."""
    until = math.inf

    def going() -> bool:
        nonlocal until
        until = min(until, time.monotonic() + seconds)
        return time.monotonic() < until

    return going


if __name__ == "__main__":
    sys.exit(main())

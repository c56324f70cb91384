"""Run all GPU measurements: kernels, layouts, steps, hand-offs, serving.

    python -m tools.bench.gpu                          all parts, in less than nine minutes
    python -m tools.bench.gpu --parts attention tuning  some of them
    python -m tools.bench.gpu --dry                     all of it on a CPU, at tiny sizes

The machine's ceilings are measured first and are the denominators of all other figures. An
operation that fails its check is reported and not timed. The other operations continue. Every row
is written to --out as soon as it is known. Times of the dry mode are meaningless.
"""

import argparse
import importlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.facts import versions
from tools.bench.gpu.goals import reached
from tools.bench.gpu.parts import FIRST, PARTS
from tools.bench.gpu.process import Part, Report, Row, run
from tools.bench.support.record import commit, emit, machine, say

BUDGET_S = 520.0
_PACKAGES = ("torch", "triton", "transformers", "nixl", "nixl-cu12", "nixl-cu13", "grpcio", "numpy")
_FACTS = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem"
_STATE = (
    "clocks.sm,clocks.mem,temperature.gpu,power.draw,power.limit,memory.used,"
    "clocks_event_reasons.active"
)


def main() -> None:
    options = _options()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before the first kernel is defined
        importlib.import_module("tests.support.hardware.interpreter").patch_language_once()
    importlib.import_module("torch")  # loaded once, before any process is forked
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    gpus = _nvidia_smi(_FACTS)
    _say_gpus("", gpus)
    facts = {"gpus": gpus, "packages": versions(_PACKAGES)}
    record: dict[str, Any] = {"facts": facts, "before": _nvidia_smi(_STATE)}
    reports = _run(options, out, started)
    record["after"] = _nvidia_smi(_STATE)
    _end(options, out, record, reports, time.monotonic() - started)


def _options() -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help=f"with {FIRST}; default: all"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all parts together")
    parser.add_argument("--out", default="var/bench-gpu", help="directory for the results")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    return parser.parse_args()


def _nvidia_smi(fields: str) -> list[dict[str, str]]:
    """Return properties of each GPU. Empty without nvidia-smi.

    No library that would initialise the GPU is loaded, because this process forks others.
    """
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    names, lines = fields.split(","), [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(names, line, strict=True)) for line in lines if len(line) == len(names)]


def _run(options: argparse.Namespace, out: Path, started: float) -> list[Report]:
    """Run the parts. Each may also use the unused time of earlier parts."""
    # These define kernels for the mode chosen above.
    from tools.bench.gpu.parts.machine import ceilings_of
    from tools.bench.gpu.setting import Setting

    wanted = [part for part in PARTS if part.name in {FIRST, *options.parts}]
    per_share = options.budget_s / sum(part.share for part in wanted)
    ceilings: dict[str, float] = {}
    reports: list[Report] = []
    due = started
    with (out / "rows.jsonl").open("w") as file:
        for part in wanted:
            due += part.share * per_share
            limit_s = due - time.monotonic()
            say(f"\n{part.name}: {part.what}, at most {limit_s:.0f} s")

            def keep(row: Row, part: Part = part) -> None:
                file.write(json.dumps({"part": part.name, **row}) + "\n")
                file.flush()

            report = run(part, partial(Setting.make, ceilings, dry=options.dry), limit_s, keep)
            report.show()
            reports.append(report)
            if part.name == FIRST:
                ceilings = ceilings_of(report.rows)
                if not all(ceilings.values()):
                    say("no ceilings, and so no shares of them: the other parts are left out")
                    break
    return reports


def _end(
    options: argparse.Namespace,
    out: Path,
    record: dict[str, Any],
    reports: Sequence[Report],
    wall_s: float,
) -> None:
    """Print the summary as the last line. record.json also contains every row."""
    parts = {r.part.name: {"status": r.status, "wall_s": r.wall_s} for r in reports}
    rows = [{"part": r.part.name, **row} for r in reports for row in r.rows]
    goals = reached(rows)
    say()
    for when in ("before", "after"):
        _say_gpus(f"{when}: ", record[when])
    for goal in goals:
        limit = "at least {at_least:.0%}" if goal["at_least"] else "at most {at_most:.0%}"
        measured = "not measured" if goal["measured"] is None else f"{goal['measured']:.1%}"
        say(f"{goal['goal']}: {measured}, goal {limit.format(**goal)}")
    summary = {**record, "parts": parts, "goals": goals, "wall_s": round(wall_s, 1)}
    whole = {"commit": commit(), "machine": machine(), "config": vars(options), **summary}
    (out / "record.json").write_text(json.dumps({**whole, "rows": rows}))
    ceilings = [row for row in rows if row.get("ceiling") is not None]
    emit("gpu", vars(options), ceilings, **summary)
    if any(report.status.startswith("failed") for report in reports):
        raise SystemExit(1)


def _say_gpus(when: str, gpus: Sequence[dict[str, str]]) -> None:
    for gpu in gpus:
        say(when + ", ".join(f"{name} {value}" for name, value in gpu.items()))


if __name__ == "__main__":
    main()

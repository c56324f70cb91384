"""The record of every benchmark: its environment and numbers.

The last line of stdout is JSON. All output for people goes to stderr.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.facts import cpu_name, versions

ROOT = Path(__file__).resolve().parents[3]
_LOAD_AT_START = os.getloadavg()[0]  # of other processes: a benchmark must run alone
_PACKAGES = ("torch", "transformers", "grpcio", "nixl", "numpy")


def say(line: str = "") -> None:
    """Print one line for people."""
    print(line, file=sys.stderr, flush=True)


def emit(
    bench: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    """Print the record of one run, as the last line of stdout."""
    record = {"bench": bench, "commit": commit(), "machine": machine(), "config": config}
    print(json.dumps({**record, **more, "rows": rows}), flush=True)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print rows for people. `columns`: format of a row (as for str.format) by heading."""
    cells = [list(columns)]
    cells += [[form.format(**row) for form in columns.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print all fields of rows for people, under their names. Floats have four digits."""
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    cells = [{f"c{i}": row.get(name, "") for i, name in enumerate(names)} for row in flat]
    table(cells, {name: f"{{c{i}}}" for i, name in enumerate(names)})


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a row, and those of the objects in it."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", f"{value:.4g}" if isinstance(value, float) else str(value)


def percentiles(values: Iterable[float], scale: float = 1.0, digits: int = 2) -> dict[str, float]:
    """Return p50, p90 and p99, each times `scale`. Zeros without values."""
    data = np.fromiter(values, float)
    if not len(data):
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    p50, p90, p99 = (np.percentile(data, (50, 90, 99)) * scale).round(digits).tolist()
    return {"p50": p50, "p90": p90, "p99": p99}


def commit() -> str:
    """Return the measured commit, with a "+" if files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain") else "")


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(_LOAD_AT_START, 2),
        "python": platform.python_version(),
        **versions(_PACKAGES),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # the measuring machine may lack git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""The share of product lines that simulations in virtual time execute."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from simulation.virtual.process import environment
from tools.bench.support.record import ROOT, say, show

PARTS = (
    "router/cluster",
    "router/policy",
    "router/generation.py",
    "router/record.py",
    "router/token_buffer.py",
    "node/frontend",
    "decode_node",
    "prefill_node",
    "kvtransfer/protocol",
    "kvtransfer/transfer",
    "engine/scheduler",
)
_GPU = {"gpu": "h100", "model": "llama-3-8b"}
_SMALL_POOLS = {"engine.cache.num_pages": 300, "engine.cache.swap_pages": 300}
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "failures": {
        "cluster": {**_GPU, "prefill": 2, "decode": 3, "options": _SMALL_POOLS},
        "load": {"rate": 20, "input": 400, "output": 120, "requests": 80},
        "faults": [
            {"kill": "decode/0", "at": 1.5},
            {"freeze": "prefill/0", "at": 2, "seconds": 20},
        ],
        "operations": [
            {"set_role": "decode/2", "role": "prefill", "at": 1},
            {"migrate": "decode/1", "at": 0.8},
        ],
    },
    "long prompts": {
        "cluster": {**_GPU, "prefill": 2, "decode": 2},
        "load": {"rate": 8, "input": 7000, "output": 40, "requests": 30},
        "operations": [
            {"drain": "decode/1", "at": 2},
            {"set_role": "prefill/0", "role": "decode", "at": 3},
        ],
    },
    "colocated": {
        "cluster": {**_GPU, "colocated": 3},
        "load": {"rate": 10, "input": 1500, "output": 40, "requests": 40},
        "policy": "least_tokens",
        "faults": [{"kill": "colocated/0", "at": 2}],
    },
}


def measure(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each part. `directory`: for files."""
    file, found = directory / "sim.yaml", directory / "lines.json"
    executed: dict[str, set[int]] = defaultdict(set)
    for name, scenario in SCENARIOS.items():
        say(f"  {name}")
        file.write_text(json.dumps(scenario))
        command = [sys.executable, "-m", "tools.bench.simulation.traced", str(found), str(file)]
        command += (str(each) for part in PARTS for each in _files(part))
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
        for path, lines in json.loads(found.read_bytes()).items():
            executed[path] |= set(lines)
    rows, totals = list[dict[str, Any]](), {"executed": 0, "lines": 0}
    for part in PARTS:
        counts = {"executed": 0, "lines": 0}
        for each in _files(part):
            lines = _lines(each)
            counts["lines"] += len(lines)
            counts["executed"] += len(lines & executed[str(each)])
        totals = {name: total + counts[name] for name, total in totals.items()}
        rows.append({"part": part, **counts})
    rows.append({"part": "all", **totals})
    return [{**row, "share": row["executed"] / row["lines"]} for row in rows]


def show_lines(rows: list[dict[str, Any]]) -> None:
    show(rows)
    say("Goal: 60 % of all.")


def _files(part: str) -> list[Path]:
    where = ROOT / part
    return [where] if where.is_file() else sorted(where.rglob("*.py"))


def _lines(file: Path) -> set[int]:
    """Return the numbers of a file's lines with instructions, without docstrings."""
    text = file.read_text()
    found, codes = set[int](), [compile(text, str(file), "exec")]
    while codes:
        code = codes.pop()
        found |= {line for *_, line in code.co_lines() if line}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found

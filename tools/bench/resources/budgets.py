"""Budgets for the number of instructions of kernels, from the last reviewed measurement.

A change that makes a kernel longer fails with its name. If the longer kernel is acceptable, record
it (`python -m tools.bench.resources --write-budgets`, for all or for some `--arch` or `--only`) and
give the reason. Two releases of Triton have a file each: the newest, and the one that torch's CUDA
wheels require. With another release, the comparison is skipped.

Instructions are counted for a dense model, a model with experts, a hybrid, a model with latents,
and attention of wide heads in 8 bits, on one architecture of each generation (`COUNTED`). They are
counted in machine code, or in PTX without a disassembler.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import triton

from tools.bench.resources import variants

_RELEASE = ".".join(triton.__version__.split(".")[:2])
FILE = Path(__file__).with_name(f"instructions-{_RELEASE}.json")
MODELS = (
    variants.LLAMA3_8B.name,
    variants.QWEN3_30B.name,
    variants.QWEN3_NEXT,
    variants.DEEPSEEK_V3,
)
ATTENTION = ("_split_kernel", "_extend_kernel")  # kernels counted for wide heads in 8 bits
COUNTED = (80, 90, 100)  # code for other architectures resembles one of these
PAGE = "bfloat16 page 16"
SLACK = 0.03  # tolerance for another patch release

Counts: TypeAlias = dict[str, dict[str, int]]  # by language: "instructions" and "loop"
Budgets: TypeAlias = dict[str, Counts]  # by "sm_90 kernel operation"


def counted(rows: Iterable[Mapping[str, Any]]) -> Budgets:
    """Return the instruction counts from rows of `tools.bench.resources`.

    If one operation launches a kernel in several forms, the largest count is used.
    """
    found: Budgets = {}
    for row in (row for row in rows if row["arch"] in COUNTED):
        for variant in row["variants"]:
            model, _, operation = variant.partition(" ")
            wide = variants.WIDE in operation and row["kernel"] in ATTENTION
            known = model in MODELS or wide
            if known and row["codes"] and _has_a_budget(operation):
                name = operation.removeprefix(PAGE).removeprefix("bfloat16").strip()
                name = f"sm_{row['arch']} {row['kernel']} {name}"
                found[name] = _largest(found.get(name, {}), row["codes"])
    return dict(sorted(found.items()))


def _largest(one: Counts, other: Counts) -> Counts:
    both = {**one, **other}
    for language in one.keys() & other.keys():
        parts = one[language].items()
        both[language] = {part: max(count, other[language][part]) for part, count in parts}
    return both


def exceeded(rows: Iterable[Mapping[str, Any]], budgets: Budgets) -> Iterator[str]:
    """Yield a sentence for each exceeded budget."""
    for name, codes in counted(rows).items():
        arch, kernel, operation = name.split(" ", 2)
        which = f"{kernel} on {arch} ({operation})"
        language = "sass" if "sass" in codes else "ptx"
        allowed = budgets.get(name, {}).get(language)
        if allowed is None:
            yield f"{which} has no budget of {language} in {FILE.name}"
            continue
        for part, count in codes[language].items():
            if count > allowed[part] * (1 + SLACK):
                yield f"{which} has {count} {language} {part}, where {allowed[part]} were enough"


def read() -> Budgets:
    budgets: Budgets = json.loads(FILE.read_text())
    return budgets


def known() -> bool:
    """Return whether there are budgets for this release of Triton."""
    return FILE.exists()


def write(found: Budgets, whole: Collection[int]) -> None:
    """Add new counts to the budgets.

    Args:
        whole: architectures whose kernels were all counted. Their old budgets are replaced.
    """
    gone = tuple(f"sm_{arch} " for arch in whole)
    kept = read() if known() else {}
    kept = {name: codes for name, codes in kept.items() if not name.startswith(gone)}
    budgets = dict(sorted((kept | found).items()))
    lines = (f"{json.dumps(name)}: {json.dumps(codes)}" for name, codes in budgets.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _has_a_budget(operation: str) -> bool:
    return " page " not in operation or operation.startswith(PAGE)

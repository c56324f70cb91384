"""How many instructions kernels may have, by what they had when somebody last looked.

A change of a kernel that makes one longer fails by its name; whoever finds the longer one good
writes it down (`python -m tools.bench.resources --write-budgets`, of all or of some `--arch` or
`--only`) and says why. Every release of Triton has a file of its own: the newest, and the one that
torch's wheels for CUDA ask for. With another one nothing is compared.
Counted for one model, one with experts, a hybrid and one with latents, on one architecture of each
generation (`COUNTED`), in machine code, or in PTX where nothing disassembles.
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
COUNTED = (80, 90, 100)  # the others have code much like that of one of them
PAGE = "bfloat16 page 16"
SLACK = 0.03  # what another patch of a release may add

Counts: TypeAlias = dict[str, dict[str, int]]  # by language: "instructions" and "loop"
Budgets: TypeAlias = dict[str, Counts]  # by "sm_90 kernel operation"


def counted(rows: Iterable[Mapping[str, Any]]) -> Budgets:
    """Of the rows of `tools.bench.resources`; of a kernel that one operation launches in several
    forms the largest numbers."""
    found: Budgets = {}
    for row in (row for row in rows if row["arch"] in COUNTED):
        for variant in row["variants"]:
            model, _, operation = variant.partition(" ")
            if model in MODELS and row["codes"] and _has_a_budget(operation):
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
    """What is wrong, by kernel."""
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
    """Whether somebody has looked with this release of Triton."""
    return FILE.exists()


def write(found: Budgets, whole: Collection[int]) -> None:
    """Adds what was found to what is there.

    Args:
        whole: architectures whose kernels were all looked at: there is nothing else of them then.
    """
    gone = tuple(f"sm_{arch} " for arch in whole)
    kept = read() if known() else {}
    kept = {name: codes for name, codes in kept.items() if not name.startswith(gone)}
    budgets = dict(sorted((kept | found).items()))
    lines = (f"{json.dumps(name)}: {json.dumps(codes)}" for name, codes in budgets.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _has_a_budget(operation: str) -> bool:
    return " page " not in operation or operation.startswith(PAGE)

"""Report registers, spills and shared memory of every kernel that serving launches. Needs no GPU.

    python -m tools.bench.resources [--arch 80 90 100] [--only PATTERN] [--all] [--files FOLDER]

The kernels' own launchers run on host tensors, and the kernels they would have launched are
compiled ahead of time for each architecture. The command fails and names the kernel if

    - a kernel does not compile, spills registers, or needs more shared memory than a block may
        have;
    - a kernel has more instructions than `budgets.py` allows;
    - a kernel is compiled again only because of a number that changes from step to step, that is,
        during traffic;
    - a kernel leaves the fusion of products and sums to Triton's default, which changes; or
    - `kernels` has a kernel that no variant launches.

Kernels with equal code are one row. With --only all launches are recorded, but a launch is compiled
only if a part of its architecture, variant and kernel ("sm_90 llama3-8b bfloat16 page 16 store
_rope_and_store_kernel") matches the regular expression.
"""

import argparse
import importlib
import os
import pkgutil
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

import kernels
from kernels import device
from kernels.bound import BoundKernel
from tools.bench.resources import budgets, compilation, variants
from tools.bench.resources.compilation import Compiled, Launch
from tools.bench.support.record import emit, say, table

_COLUMNS = {
    "sm": "{arch}",
    "kernel": "{kernel}",
    "for (and others)": "{variants[0]} {more}",
    "compile s": "{compile_s}",
    "warps": "{warps}",
    "stages": "{stages}",
    "registers": "{registers}",
    "stack": "{stack_bytes}",
    "spill": "{spill_bytes}",
    "shared": "{shared_bytes}",
    "instructions": "{instructions}",
    "loop": "{loop}",
    "wgmma": "{wgmma}",
    "tcgen05": "{tcgen05}",
    "mma": "{mma}",
    "cp.async": "{cp_async}",
    "global accesses, bytes a thread": "{widths}",
}


def record(arch: int, *, every: bool) -> tuple[dict[Launch, list[str]], list[str]]:
    """Return launches with the names of their variants, and a sentence for each problem."""
    launches: dict[Launch, list[str]] = {}
    problems = []
    for variant in variants.serving(arch, every=every):
        with compilation.recorded(arch) as recorded:
            for count in variants.COUNTS:
                variant.launch(count)
        first: dict[tuple[str, str], Launch] = {}
        for launch in recorded:
            launches.setdefault(launch, []).append(variant.name)
            if not launch.says_fusion:
                problems.append(f"{launch.kernel} is launched without enable_fp_fusion")
            known = first.setdefault((launch.kernel, launch.chosen), launch)
            if known is not launch:
                differences = ", ".join(known.differences(launch))
                problems.append(f"{launch.kernel} is compiled again for another {differences}")
    return launches, problems


def never_launched(launched: Iterable[str]) -> list[str]:
    """Return kernels of `kernels` that are neither launched nor called by another kernel."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(kernels.__path__, "kernels.")
    ]
    found = {
        name: made.src
        for module in modules
        for name, made in vars(module).items()
        if isinstance(made, JITFunction | BoundKernel) and made.__module__ == module.__name__
    }
    # The first name with a parenthesis is the function's own.
    called = {name for source in found.values() for name in re.findall(r"\b(\w+)\(", source)[1:]}
    return sorted(found.keys() - called - set(launched))


def rows_of(made: Iterable[Compiled], launches: dict[Launch, list[str]]) -> list[dict[str, Any]]:
    """Return one row for each distinct code, and for each launch without code."""
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for one in made:
        launch = one.launch
        row = {
            "arch": launch.arch,
            "kernel": launch.kernel,
            "variants": [],
            "problem": one.problem,
            "compile_s": one.seconds,
            "warps": one.warps,
            "stages": one.stages,
            "registers": one.registers,
            "stack_bytes": one.stack_bytes,
            "spill_bytes": one.spill_bytes,
            "shared_bytes": one.shared_bytes,
            "codes": {language: asdict(code) for language, code in one.codes.items()},
            **one.instructions,
            "accesses": one.accesses,
        }
        key = (launch.arch, launch.kernel, one.digest or launch)
        variants = rows.setdefault(key, row)["variants"]
        variants += [name for name in launches[launch] if name not in variants]
    return list(rows.values())


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    more = len(row["variants"]) - 1
    widths = ", ".join(f"{name} x{count}" for name, count in row["accesses"].items())
    code = row["codes"].get("sass") or row["codes"].get("ptx") or {"instructions": 0, "loop": 0}
    return {**row, **code, "more": f"(+{more})" if more else "", "widths": widths}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    supported = sorted(compilation.SHARED_BYTES)
    parser.add_argument("--arch", type=int, nargs="+", choices=supported, default=supported)
    parser.add_argument("--only", default="", metavar="PATTERN", help="compile those alone")
    parser.add_argument("--all", action="store_true", help="all shapes, dtypes and page sizes")
    parser.add_argument(
        "--write-budgets",
        action="store_true",
        help=f"what is counted goes into {budgets.FILE.name}, and all else stays there",
    )
    parser.add_argument("--files", type=Path, help="folder for TTGIR and PTX of each kernel")
    options = parser.parse_args()
    if device.INTERPRETED:
        parser.error("unset TRITON_INTERPRET: nothing can be compiled for it")
    if options.files:
        options.files.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    launches: dict[Launch, list[str]] = {}
    problems: list[str] = []
    for arch in options.arch:
        recorded, found = record(arch, every=options.all)
        launches |= recorded
        problems += found
    absent = never_launched({launch.kernel for launch in launches})
    problems += [f"{name} is launched by no variant" for name in absent]
    wanted = [
        launch
        for launch, names in launches.items()
        if any(
            re.search(options.only, f"sm_{launch.arch} {name} {launch.kernel}") for name in names
        )
    ]
    workers = len(os.sched_getaffinity(0))
    rows = rows_of(compilation.compiled(wanted, workers, options.files), launches)
    problems += [
        f"{row['kernel']} on sm_{row['arch']} ({row['variants'][0]}) {row['problem']}"
        for row in rows
        if row["problem"]
    ]
    if options.write_budgets:
        budgets.write(budgets.counted(rows), () if options.only else options.arch)
    if budgets.known():
        problems += budgets.exceeded(rows, budgets.read())
    else:
        say(f"no numbers of instructions are compared: there is no {budgets.FILE.name}")
    table([_for_people(row) for row in rows], _COLUMNS)
    seconds = round(time.monotonic() - began, 1)
    say(f"{len(wanted)} launches, {len(rows)} kernels, triton {triton.__version__}, {seconds} s")
    for problem in dict.fromkeys(problems):
        say(f"FAILED: {problem}")
    config = {
        "triton": triton.__version__,
        "arch": options.arch,
        "only": options.only,
        "all": options.all,
    }
    emit("resources", config, rows, seconds=seconds, problems=problems)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

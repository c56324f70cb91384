"""Report registers, spills and shared memory of every kernel that serving launches. Needs no GPU.

    python -m tools.bench.resources [--arch 80 90 100] [--only PATTERN]

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction

import kernels
from kernels import device
from kernels.bound import BoundKernel
from tools.bench.resources import budgets, compilation, variants
from tools.bench.resources.compilation import KernelLaunch
from tools.bench.support.record import emit, say, show


def record(arch: int) -> tuple[dict[KernelLaunch, list[str]], list[str]]:
    """Return launches with the names of their variants, and a sentence for each problem."""
    launches: dict[KernelLaunch, list[str]] = {}
    problems = []
    for variant in variants.serving(arch):
        with compilation.recorded(arch) as recorded:
            for count in variants.COUNTS:
                variant.launch(count)
        first: dict[tuple[str, str], KernelLaunch] = {}
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


def rows_of(
    made: Iterable[dict[str, Any]],
    wanted: Sequence[KernelLaunch],
    names: Mapping[KernelLaunch, list[str]],
) -> list[dict[str, Any]]:
    """Return one row for each distinct code, and for each launch without code."""
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for launch, fields in zip(wanted, made, strict=True):
        key = (launch.arch, launch.kernel, fields.pop("digest") or launch)
        labels = {"arch": launch.arch, "kernel": launch.kernel, "variants": []}
        variants = rows.setdefault(key, {**labels, **fields})["variants"]
        variants += [name for name in names[launch] if name not in variants]
    return list(rows.values())


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row without those of another language."""
    first, *others = row["variants"]
    codes = row["codes"]
    accesses = ", ".join(f"{name} x{count}" for name, count in row["accesses"].items())
    return {
        **row,
        "variants": f"{first} (+{len(others)})" if others else first,
        "codes": codes.get("sass", codes.get("ptx", {})),
        "accesses": accesses,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    supported = sorted(compilation.SHARED_BYTES)
    parser.add_argument("--arch", type=int, nargs="+", choices=supported, default=supported)
    parser.add_argument("--only", default="", metavar="PATTERN", help="compile those alone")
    parser.add_argument(
        "--write-budgets",
        action="store_true",
        help=f"what is counted goes into {budgets.FILE.name}, and all else stays there",
    )
    options = parser.parse_args()
    if device.INTERPRETED:
        parser.error("unset TRITON_INTERPRET: nothing can be compiled for it")
    return options


def main() -> None:
    options = _options()
    began = time.monotonic()
    names: dict[KernelLaunch, list[str]] = {}
    problems: list[str] = []
    for arch in options.arch:
        recorded, found = record(arch)
        names |= recorded
        problems += found
    absent = never_launched({launch.kernel for launch in names})
    problems += [f"{name} is launched by no variant" for name in absent]
    only = re.compile(options.only)
    wanted = [
        launch
        for launch, variants in names.items()
        if any(only.search(f"sm_{launch.arch} {name} {launch.kernel}") for name in variants)
    ]
    workers = len(os.sched_getaffinity(0))
    rows = rows_of(compilation.compiled(wanted, workers), wanted, names)
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
    show(map(_for_people, rows))
    seconds = round(time.monotonic() - began, 1)
    say(f"{len(wanted)} launches, {len(rows)} kernels, triton {triton.__version__}, {seconds} s")
    for problem in dict.fromkeys(problems):
        say(f"FAILED: {problem}")
    config = {"triton": triton.__version__, "arch": options.arch, "only": options.only}
    emit("resources", config, rows, seconds=seconds, problems=problems)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

"""Counts a kernel's instructions, and those of one iteration of its innermost loop.

Counted in machine code (SASS) if Triton's disassembler is installed, and in PTX. The two are not
comparable: PTX is the code before register allocation and instruction scheduling.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from triton import knobs

_SASS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_SASS_TARGET = re.compile(r"^(?:@!?U?P\d+\s+)?BRA\b.*?0x([0-9a-f]+)")
_PTX_LABEL = re.compile(r"^(\$\w+):$")
_PTX_TARGET = re.compile(r"^(?:@\S+\s+)?bra(?:\.uni)?\s+(\$\w+)")
_PRODUCT = re.compile(r"\b(?:H|HG|UTC[A-Z]+)MMA\b|\bwgmma\.mma_async|\btcgen05\.mma|\bmma\.sync")


Code: TypeAlias = dict[str, int]


def codes_of(made: Any) -> dict[str, Code]:
    """Return the counts of a kernel compiled by Triton, by language, "sass" or "ptx".

    "instructions" are all. "loop" is for one iteration of the shortest loop on tensor cores, with
    every forward branch taken. 0 without one. In attention, this is the loop over tiles that need
    no mask.
    """
    codes = {"ptx": _code(*_ptx_lines(made.asm["ptx"]))}
    if sass := _disassembled(made.asm["cubin"]):
        codes["sass"] = _code(*_sass_lines(sass))
    return codes


def _code(lines: Sequence[str], targets: Mapping[int, int]) -> Code:
    return {"instructions": len(lines), "loop": _loop(lines, targets)}


def _disassembled(cubin: bytes) -> str:
    """Disassemble the cubin. Empty without a disassembler."""
    try:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return ""


def _sass_lines(sass: str) -> tuple[list[str], dict[int, int]]:
    """Return the instructions, and the targets of their branches."""
    found = _SASS.findall(sass)
    places = {int(address, 16): place for place, (address, _) in enumerate(found)}
    lines = [instruction for _, instruction in found]
    branches = {place: _SASS_TARGET.match(line) for place, line in enumerate(lines)}
    return lines, {place: places[int(to[1], 16)] for place, to in branches.items() if to}


def _ptx_lines(ptx: str) -> tuple[list[str], dict[int, int]]:
    lines: list[str] = []
    labels = {}
    for raw in ptx.splitlines():
        line = raw.partition("//")[0].strip()
        if match := _PTX_LABEL.match(line):
            labels[match[1]] = len(lines)
        elif line.endswith(";") and not line.startswith("."):
            lines.append(line)
    branches = {place: _PTX_TARGET.match(line) for place, line in enumerate(lines)}
    return lines, {place: labels[to[1]] for place, to in branches.items() if to}


def _loop(lines: Sequence[str], targets: Mapping[int, int]) -> int:
    products = [place for place, line in enumerate(lines) if _PRODUCT.search(line)]
    loops = [
        (first, last)
        for last, first in targets.items()
        if first < last and any(first <= place <= last for place in products)
    ]
    inner = [
        loop
        for loop in loops
        if not any(loop != one and loop[0] <= one[0] and one[1] <= loop[1] for one in loops)
    ]
    return min((_iteration(first, last, targets) for first, last in inner), default=0)


def _iteration(first: int, last: int, targets: Mapping[int, int]) -> int:
    """Count instructions from first to last along the forward branches that stay in the loop."""
    count, place = 0, first
    while place <= last:
        count += 1
        target = targets.get(place, place)
        place = target if place < target <= last else place + 1
    return count

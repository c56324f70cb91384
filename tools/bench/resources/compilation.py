"""Compiles kernels for an absent GPU, as their launchers request them.

Launchers run unchanged, on host tensors. Each launch is recorded with its true signature (types,
alignment, constants, options) and not executed. Then Triton compiles the recorded launches, in
separate processes. This shows that they compile and which resources they use, but neither results
nor speed.

Does not work in a process with TRITON_INTERPRET, whose kernels are made for the interpreter.
"""

import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from kernels import device
from tools.bench.resources.sass import codes_of

# By compute capability. Source: CUDA C++ Programming Guide, Compute Capabilities.
_LARGE, _SMALL = 232448, 101376
SHARED_BYTES = {80: 166912, 86: _SMALL, 89: _SMALL, 90: _LARGE, 100: _LARGE, 120: _SMALL}
# A100, RTX A6000, L40S, H100, B200 and RTX PRO 6000.
_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}

_INSTRUCTIONS = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma": re.compile(r"\bmma\.sync"),
    "cp_async": re.compile(r"\bcp\.async\.c[ag]\."),
    "dependent": re.compile(r"\bgriddepcontrol\."),
}
# The fields of a launch without code.
_NUMBERS = ("compile_s", "warps", "stages", "registers", "stack_bytes", "spill_bytes")
_NOTHING: dict[str, Any] = {
    "digest": "",
    **dict.fromkeys((*_NUMBERS, "shared_bytes", *_INSTRUCTIONS), 0),
    "codes": {},
    "accesses": {},
}
_ACCESS = re.compile(r"\b(ld|st)\.global((?:\.[\w:]+)*)\.[busf](\d+)\b")
# Lines of the assembler's report, one of each kind for every function in a kernel.
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel in one specialisation."""

    arch: int
    module: str
    kernel: str
    chosen: str  # by the launcher: constants, dtypes of tensors, options
    values: tuple[tuple[str, str], ...]  # by parameter: derived from its value
    says_fusion: bool  # sets enable_fp_fusion. Otherwise Triton's default applies
    specialisation: str = field(compare=False, repr=False)  # as Triton serialises it

    def differences(self, other: "KernelLaunch") -> list[str]:
        """Return the parameters that alone made Triton compile the kernel twice."""
        return [
            f"{name} ({mine} and {others})"
            for (name, mine), (_, others) in zip(self.values, other.values, strict=True)
            if mine != others
        ]


class AbsentDevice:
    """A GPU of some compute capability, as far as Triton's compiler needs one.

    Its device number is its capability, because Triton caches device properties by number.
    """

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[device]}

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[dict[KernelLaunch, None]]:
    """Record the kernels of all launchers for this architecture instead of running them."""
    launches: dict[KernelLaunch, None] = {}
    said: set[str] = set()
    parse = CUDABackend.parse_options

    def listen(backend: CUDABackend, options: dict[str, Any]) -> Any:
        said.clear()
        said.update(options)
        return parse(backend, options)

    def note(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        launches[_launch(arch, fn, compile, "enable_fp_fusion" in said)] = None
        return True  # Triton then neither compiles nor launches

    with (
        mock.patch.object(device, "uses_triton", return_value=True),
        mock.patch.object(device, "num_multiprocessors", return_value=_MULTIPROCESSORS[arch]),
        mock.patch.object(knobs.runtime, "jit_cache_hook", note),
        mock.patch.object(CUDABackend, "parse_options", listen),
    ):
        driver.set_active(AbsentDevice(arch))
        try:
            yield launches
        finally:
            driver.set_active(None)


def _launch(arch: int, fn: Any, info: Mapping[str, Any], says_fusion: bool) -> KernelLaunch:
    constants, signature, attributes = info["constants"], info["signature"], info["configs"][0]
    chosen: list[object] = [json.loads(info["specialization_data"])["options"]]
    values = []
    for parameter in fn.jit_function.params:
        kind, place = signature[parameter.name], (parameter.num,)
        constant = constants.get(place)
        if parameter.is_constexpr or (kind == "constexpr" and constant is None):
            chosen.append(f"{parameter.name} = {constant}")
            continue
        if kind[0] == "*":
            chosen.append(f"{parameter.name}: {kind}")
        seen = kind if constant is None else str(constant)
        divisible = "".join(f" by {number}" for _, number in attributes.get(place, ()))
        values.append((parameter.name, seen + divisible))
    return KernelLaunch(
        arch,
        fn.module,
        fn.name,
        json.dumps(chosen),
        tuple(values),
        says_fusion,
        info["specialization_data"],
    )


def compiled(launches: Iterable[KernelLaunch], workers: int) -> Iterator[dict[str, Any]]:
    """Compile launches in order, in `workers` processes and without a cache.

    Yields fields of rows of `tools.bench.resources`, and the key "digest", which is equal for
    kernels with equal code and empty without code.
    """
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        ProcessPoolExecutor(workers, context) as pool,
    ):
        yield from pool.map(_compiled, launches)


def _compiled(launch: KernelLaunch) -> dict[str, Any]:
    driver.set_active(AbsentDevice(launch.arch))
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    log = io.StringIO()
    began = sum(os.times()[:4])
    try:
        with (
            contextlib.redirect_stdout(log),
            mock.patch.object(knobs.nvidia, "dump_ptxas_log", True),
        ):
            made = kernel.preload(launch.specialisation)
    except Exception as error:  # noqa: BLE001  whatever the compiler raises is the finding
        return {**_NOTHING, "problem": f"does not compile: {type(error).__name__}: {error}"}
    seconds = sum(os.times()[:4]) - began
    stacks = [tuple(map(int, found)) for found in _STACK.findall(log.getvalue())]
    registers = [int(found) for found in _REGISTERS.findall(log.getvalue())]
    if not stacks or not registers:
        problem = f"does not compile: nothing is said of its registers: {log.getvalue()}"
        return {**_NOTHING, "problem": problem}
    ptx = made.asm["ptx"]
    code = re.sub(r"//.*|\.loc.*|\.file.*", "", ptx.partition(".section")[0])
    digest = hashlib.sha256(code.encode()).hexdigest()[:12]
    spilled = sum(stores + loads for _, stores, loads in stacks)
    return {
        "digest": digest,
        "problem": _problem(launch.arch, spilled, made.metadata.shared),
        "compile_s": round(seconds, 2),  # CPU time, also needed at a server's start
        "warps": made.metadata.num_warps,
        "stages": made.metadata.num_stages,
        "registers": max(registers),
        "stack_bytes": sum(stack for stack, _, _ in stacks),
        "spill_bytes": spilled,
        "shared_bytes": made.metadata.shared,
        "codes": codes_of(made),
        **{name: len(form.findall(ptx)) for name, form in _INSTRUCTIONS.items()},
        "accesses": _accesses(ptx),
    }


def _problem(arch: int, spilled: int, shared: int) -> str:
    """Return why a kernel must not be served, or ""."""
    if spilled:
        return f"spills {spilled} bytes of registers"
    if shared > (limit := SHARED_BYTES[arch]):
        return f"wants {shared} bytes of shared memory of {limit}"
    return ""


def _accesses(ptx: str) -> dict[str, int]:
    """Return the number of instructions on global memory, by direction and bytes per thread."""
    counts: Counter[str] = Counter()
    for direction, modifiers, bits in _ACCESS.findall(ptx):
        vector = re.search(r"\.v(\d)", modifiers)
        num_bytes = int(bits) // 8 * (int(vector[1]) if vector else 1)
        counts[f"{direction} {num_bytes}"] += 1
    return dict(sorted(counts.items()))

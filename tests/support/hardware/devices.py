"""Devices that tests run on, and the operations compiled for this CPU."""

import functools

import pytest
import torch

from kernels import device
from kernels.cpu.compiler import NotCompiled, cache_directory, library
from kernels.cpu.operators import Operators

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_CUDA = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
CPU_AND_CUDA = (pytest.param(CPU, id="cpu"), ON_CUDA)


@functools.cache
def operators_here(threads: int = 2) -> Operators | None:
    """Return operations compiled for this machine, cached. None without a compiler."""
    try:
        return Operators(library(cache_directory(), lambda: None), threads)
    except NotCompiled:
        return None


def need_invariant_products(dtype: torch.dtype, quantize: str = "none") -> None:
    """Skip the test on a processor that `engine.batch_invariant` does not support for these
    settings."""
    operators = operators_here()
    for each in (dtype, torch.int8) if quantize == "int8" else (dtype,):
        if operators is None or not operators.multiplies(each):
            pytest.skip(f"the compiled kernels do not multiply {each} on this processor")


def compute_as_a_node() -> None:
    """Compute with one thread and with compiled operations, as a node does, until the test ends.

    With the references of torch a step takes several times as long.
    """
    torch.set_num_threads(1)
    device.use_compiled(operators_here(threads=1))


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use "compiled" operations (else skip the test) or "torch" in engines of a test."""
    compiled = operators_here() if kind == "compiled" else None
    if kind == "compiled" and compiled is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(device, "compiled_for", lambda where: compiled)

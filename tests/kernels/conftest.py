"""Fixtures of kernel tests: fixed random numbers, and memory that is NaN until it is written."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import device
from kernels.cpu.compiler import cache_directory, library
from kernels.cpu.operators import Operators
from tests.support.hardware import interpreter
from tests.support.hardware.devices import operators_here

# Without a GPU, in Triton's interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.INTERPRETED:
    interpreter.patch_language_once()


def check_refused(reason: str, call: Callable[..., object], *args: Any, **options: Any) -> None:
    """Expect a ValueError with this reason."""
    with pytest.raises(ValueError, match=reason):
        call(*args, **options)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add these tests to `-m gpu` if kernels are compiled for a GPU, but not if they run in the
    interpreter."""
    for item in items:
        if DEVICE.type == "cuda" and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """In deterministic mode, torch fills the result of `empty` with NaN: unwritten output then
    fails.

    Some operations of the references have no deterministic form on a GPU, and only warn.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def operators() -> Operators:
    """Return the operations compiled for this machine, or found in the cache."""
    return operators_here() or pytest.skip("no C++ compiler")


@pytest.fixture(scope="session")
def teams(operators: Operators) -> list[Operators]:
    """Return the same operations with one thread, with two, and with more than this machine may
    have cores."""
    path = library(cache_directory(), lambda: None)
    return [Operators(path, threads=threads) for threads in (1, 2, 7)]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's kernels on any device."""
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)


@pytest.fixture(params=["reference", "compiled", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select one of an operation's implementations, on any device."""
    kind: str = request.param
    monkeypatch.setattr(device, "uses_triton", lambda tensor: kind == "triton")
    if kind == "compiled":
        if DEVICE.type != "cpu":
            pytest.skip("tensors are on a GPU")
        compiled = request.getfixturevalue("operators")
        monkeypatch.setattr(device, "compiled_for", lambda where: compiled)
    return kind

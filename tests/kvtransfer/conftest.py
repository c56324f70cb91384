"""Fixtures of the data paths (producers that end with their test, capabilities of this machine)
and of the searches."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtransfer.backends.base import TransferBackend
from tests.support.network.data_children import make_backend
from tests.support.network.data_ends import Ends, one_sided_refusal
from tests.support.network.loopback import LoopbackBackend


@pytest.fixture(scope="session")
def one_sided(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip if processes may not read each other's memory: nixl then has no proven path."""
    refusal = one_sided_refusal(tmp_path_factory.mktemp("one_sided") / "log")
    if refusal:
        pytest.skip(f"THE NIXL PATH IS NOT TESTED, this machine forbids it: {refusal}")


ON_GPU = [
    pytest.param("nixl-cuda", marks=pytest.mark.gpu),
    pytest.param("tcp-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=["nixl", "tcp", "tcp-tls", "tcp-staged", "loopback", *ON_GPU])
def backend(request: pytest.FixtureRequest) -> TransferBackend:
    if request.param == "loopback":
        return LoopbackBackend()
    if request.param.startswith("nixl"):
        request.getfixturevalue("one_sided")
    return make_backend(request.param)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("tcp-tls", "tcp-staged")]


@pytest.fixture(params=["nixl", "tcp", *LONG, *ON_GPU])
def far_backend(request: pytest.FixtureRequest) -> str:
    """Return the name of a backend that connects processes."""
    if request.param.startswith("nixl"):
        request.getfixturevalue("one_sided")
    return str(request.param)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as exits:
        yield Ends(tmp_path / "children.log", exits)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disable the garbage collector: a search has millions of tuples, and no cycle among them."""
    gc.disable()
    yield
    gc.enable()

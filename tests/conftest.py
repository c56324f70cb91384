"""The environment of every test: isolated, one thread per library, uvloop, time limits.

It is set before the import of any module that reads it. Processes that tests start inherit it.
"""

import asyncio
import atexit
import functools
import gc
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from tests.support.runner import isolation

isolation.apply()
os.environ.update(
    OMP_NUM_THREADS="1",  # torch's own threads too: the machine has few cores and many processes
    TOKENIZERS_PARALLELISM="false",
    GRPC_VERBOSITY="NONE",  # a refused connection is no error here
    # uvloop forks where `subprocess` uses vfork. With gRPC's fork support, gRPC's threads start
    # again in the child, and sometimes one crashes the child before its exec.
    GRPC_ENABLE_FORK_SUPPORT="0",
    TRANSFORMERS_VERBOSITY="error",
)
# Without bytecode files each worker, and each process that a test starts, would compile all modules
# of the repository again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # otherwise kernels could not be called without a GPU

pytest_plugins = ["tests.support.runner.cpu_seconds", "tests.support.runner.workers"]

settings.load_profile("ci")  # the same examples everywhere, with any duration


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which takes a fifth of the time and finds no garbage.

    All modules and tests stay until the end, so later collections need not scan them either, and
    forked workers share their memory.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# At the end of the process, because extension modules would otherwise report leaks. Not earlier,
# because pytest collects garbage several times at the end of a run.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with isolation.apart(tmp_path_factory.mktemp("apart")):
        yield


@pytest.fixture(autouse=True)
def compiled_operations_end_with_their_test() -> Iterator[None]:
    """An engine that a test builds enables them for its process."""
    yield
    if (device := sys.modules.get("kernels.device")) is not None:
        device.use_compiled(None)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = {name: pytest.mark.skip(reason=reason) for name, reason in _missing(items).items()}
    for item in items:
        for name, mark in skip.items():
            if item.get_closest_marker(name):
                item.add_marker(mark)
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj, _limit_s(config, item))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # keep files together


def _missing(items: list[pytest.Item]) -> dict[str, str]:
    """Return marks of devices that this machine lacks. Loads torch only if a test needs to know."""
    wanted = {"gpu": 1, "two_gpu": 2}
    if not any(item.get_closest_marker(name) for item in items for name in wanted):
        return {}
    import torch

    count = torch.cuda.device_count()
    return {
        name: f"needs {number} CUDA device(s), this machine has {count}"
        for name, number in wanted.items()
        if count < number
    }


# A test that hangs fails alone: pytest-timeout's signal ends waits in the main thread. But uvloop
# swallows exceptions of signal handlers, so asyncio's own timeout fires earlier.


def _limit_s(config: pytest.Config, item: pytest.Item | None = None) -> float:
    mark = item and item.get_closest_marker("timeout")
    return 0.9 * float(mark.args[0] if mark else config.getini("timeout"))


def _limited(
    test: Callable[..., Awaitable[None]], limit_s: float
) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def limited(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return limited


@pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest-asyncio makes it one that is called
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    make = fixturedef.func
    if not inspect.isasyncgenfunction(make):
        return (yield)
    limit_s = _limit_s(request.config)

    @functools.wraps(make)
    async def limited(*args: object, **kwargs: object) -> AsyncIterator[object]:
        made = make(*args, **kwargs)
        async with asyncio.timeout(limit_s):
            value = await anext(made)
        yield value
        async with asyncio.timeout(limit_s):
            await anext(made, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixturedef, "func", limited)
        return (yield)

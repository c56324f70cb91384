"""A model of random weights with its responses, and logs of a shared cluster for failed tests."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.oracle import Oracle, oracle
from tests.support.models.noise_model import write
from tests.support.processes.cluster import RIGS, Cluster, Rig
from tests.support.processes.programs import Program


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noise") / "model"
    write(directory)
    return directory


@pytest.fixture(scope="session")
def known(model: Path) -> Oracle:
    return oracle(model)


@pytest.fixture(params=RIGS)
def make(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Callable[..., Cluster]:
    rig: Rig = request.param

    def make_cluster(**how: object) -> Cluster:
        return Cluster(model, tmp_path, rig=rig, **how)  # type: ignore[arg-type]

    return make_cluster


@pytest.fixture
def program() -> Iterator[type[Program]]:
    """Return a class of processes that end with the test."""
    started: list[Program] = []

    class Started(Program):
        def __init__(self, module: str, *arguments: str) -> None:
            super().__init__(module, *arguments)
            started.append(self)

    yield Started
    for each in started:
        each.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and call.when == "call":
        for value in item.funcargs.values():
            cluster = getattr(value, "cluster", value)
            if isinstance(cluster, Cluster):
                report.sections.append(("programs", cluster.last_words()))
    return report

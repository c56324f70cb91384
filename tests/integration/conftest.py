"""A failed test of a shared cluster shows what its programs said."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.support.cluster import Cluster


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

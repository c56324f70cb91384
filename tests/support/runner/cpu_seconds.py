"""A pytest plugin: `--cpu-by-file N` lists the N test files with the most CPU time.

Unlike wall-clock time, CPU time hardly depends on other load. The CPU time of a child process
counts for the test that waits for it.
"""

import resource
from collections import Counter
from collections.abc import Generator

import pytest

_ATTRIBUTE = "cpu_s"  # attribute of a report, which workers send to the main process


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "list the files that take the most CPU time"
    parser.addoption("--cpu-by-file", type=int, default=0, metavar="N", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-by-file"):
        config.pluginmanager.register(_Account(config.getoption("--cpu-by-file")))


class _Account:
    """CPU seconds by test file, including fixtures."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_file: Counter[str] = Counter()
        self._last = 0.0

    def pytest_collection_finish(self) -> None:
        self._by_file["collection"] = _used()

    def pytest_runtest_logstart(self) -> None:
        self._last = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        used = _used()
        setattr(report, _ATTRIBUTE, used - self._last)
        self._last = used
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.nodeid.partition("::")[0]] += getattr(report, _ATTRIBUTE, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self._by_file.values())
        terminalreporter.section(f"{total:.0f} s of CPU, by file")
        for file, seconds in self._by_file.most_common(self._most):
            terminalreporter.line(f"{seconds:8.1f} s  {file}")


def _used() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)

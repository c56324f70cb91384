"""A pytest plugin: `--workers N` collects once and runs the tests in N forked processes.

All tests of a file run in one process, in order. If a process dies, its running test fails, and
another process continues with the rest of the file.
"""

import itertools
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import CaptureManager
from _pytest.terminal import TerminalReporter

from common.process.leash import follow_parent
from tests.support.processes import fork_server

_number = 0  # number of this worker. A replacement has the same number


def number() -> int:
    """Return the number of this worker, at least 0, unique among running workers."""
    return _number


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run the tests in N processes (0: in this one)"
    parser.addoption("--workers", type=int, default=0, metavar="N", help=help)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not config.getoption("--workers") or config.option.collectonly or session.testsfailed:
        return None  # pytest runs them in this process, or reports collection errors
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a module started a thread while tests were collected"
    run = _Run(session)
    try:
        run.all_files(config.getoption("--workers"))
    finally:
        run.end()
    return True


class _Worker:
    """A forked process, as the collecting process sees it."""

    def __init__(self, number: int, tests: deque[int]) -> None:
        self.number = number
        self.tests = tests  # tests of its file, from the running one on

    def start(self, session: pytest.Session) -> None:
        self.connection, theirs = Pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            _be_worker(session, theirs, self.number, parent)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)

    def wait(self) -> int:
        """Wait for its end, and return its exit code as `subprocess` does."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.ended)
        self.connection.close()
        return os.waitstatus_to_exitcode(status)


class _Run:
    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        tests = range(len(session.items))
        by_file = itertools.groupby(tests, key=lambda index: session.items[index].path)
        self._files = deque(deque(group) for _, group in by_file)
        self._workers: dict[Connection | int, _Worker] = {}

    def all_files(self, most: int) -> None:
        for number in range(min(most, len(self._files))):
            self._start(number, deque())
        while self._workers:
            for worker in {self._workers[ready] for ready in wait(self._workers)}:
                self._hear(worker)

    def end(self) -> None:
        """End the workers that are still running."""
        for worker in set(self._workers.values()):
            os.kill(worker.pid, signal.SIGTERM)
            worker.wait()

    def _start(self, number: int, tests: deque[int]) -> None:
        worker = _Worker(number, tests)
        worker.start(self._session)
        self._workers |= {worker.connection: worker, worker.ended: worker}

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv() if worker.connection.poll() else None
        except EOFError:
            message = None
        match message:
            case None:
                self._replace(worker)
            case "file":
                if not worker.tests and self._files:
                    worker.tests = self._files.popleft()
                worker.connection.send([*worker.tests])
            case "finished":
                item = self._session.items[worker.tests.popleft()]
                item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case report:
                self._report(report)

    def _report(self, data: dict[str, Any]) -> None:
        hook = self._session.config.hook
        report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _replace(self, worker: _Worker) -> None:
        del self._workers[worker.connection], self._workers[worker.ended]
        code = worker.wait()
        if code == 0 and not worker.tests:
            return
        assert worker.tests, f"a worker ended with {code} after its tests"
        item = self._session.items[worker.tests.popleft()]
        message = f"the process that ran this test ended with {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        self._start(worker.number, worker.tests)


# Runs in a worker.


def _be_worker(session: pytest.Session, connection: Connection, number: int, parent: int) -> None:
    """Run the files that the parent sends, then exit."""
    global _number
    _number = number
    code = 1
    try:
        follow_parent(parent, signal.SIGTERM)
        fork_server.fork_from_this_process()
        _apart(session.config.pluginmanager)
        session.config.pluginmanager.register(_Reporter(session.config, connection))
        _run_files(session, connection)
        code = 0
    except BaseException:  # noqa: BLE001  the parent must not run on in this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _apart(plugins: pytest.PytestPluginManager) -> None:
    """Detach from the parent's terminal, and capture output in files of this process."""
    terminal = plugins.getplugin("terminalreporter")
    assert isinstance(terminal, TerminalReporter)
    terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115  to the end
    capture = plugins.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    if capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()


class _Reporter:
    """Sends the reports of this worker's tests to the process that collected them."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._connection.send(
            hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send("finished")


def _run_files(session: pytest.Session, connection: Connection) -> None:
    connection.send("file")
    while file := connection.recv():
        items: Sequence[pytest.Item] = [session.items[index] for index in file]
        # After the last test of a file, only session fixtures stay.
        for item, following in zip(items, [*items[1:], session], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return
        connection.send("file")
    session._setupstate.teardown_exact(None)

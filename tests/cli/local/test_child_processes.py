"""Child processes end on request, by force if necessary, and with their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cli.local.system import LocalSystem, report_progress
from common.process.children import ChildProcess
from tests.support.processes.programs import await_end, runs

STUBBORN = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


async def _wrote(child: ChildProcess) -> None:
    deadline = time.monotonic() + 60.0
    while not child.last_lines():
        assert time.monotonic() < deadline, "it writes nothing"
        await asyncio.sleep(0.01)


async def test_the_end_of_a_child_is_reported_with_its_code_and_last_lines(tmp_path):
    child = ChildProcess(
        "a", ["sh", "-c", "echo one; echo two >&2; exit 3"], tmp_path / "log" / "a.log"
    )
    assert await child.ended() == 3
    assert child.code == 3
    assert child.last_lines() == "one\ntwo"
    assert child.last_lines(1) == "two"


@pytest.mark.parametrize("replaces", [True, False])
async def test_the_log_of_a_child_is_readable_only_by_its_user(tmp_path, replaces):
    new, old = tmp_path / "log" / "new", tmp_path / "old"
    old.write_text("before\n")
    old.chmod(0o644)
    for log in (new, old):
        await ChildProcess("a", ["echo", "one"], log, replaces_log=replaces).ended()
        assert log.stat().st_mode & 0o777 == 0o600
    assert new.parent.stat().st_mode & 0o777 == 0o700
    assert old.read_text() == ("one\n" if replaces else "before\none\n")


def test_the_directory_of_logs_is_readable_only_by_its_user(tmp_path):
    logs = tmp_path / "var" / "log"
    logs.mkdir(mode=0o755, parents=True)
    LocalSystem([], logs, None)
    assert logs.stat().st_mode & 0o777 == 0o700


def test_an_unknown_process_has_no_id(tmp_path):
    with pytest.raises(ValueError, match="process router does not exist"):
        LocalSystem([], tmp_path / "log", None).pid("router")


async def test_stop_first_asks_the_child_to_end(tmp_path):
    script = "trap 'kill $!; exit 0' TERM; sleep 60 & echo up; wait"
    child = ChildProcess("a", ["sh", "-c", script], tmp_path / "a")
    await _wrote(child)
    assert await child.stop(60.0) is True
    assert child.code == 0


async def test_stop_kills_a_child_that_does_not_end(tmp_path):
    child = ChildProcess("a", [sys.executable, "-c", STUBBORN], tmp_path / "a")
    await _wrote(child)
    assert await child.stop(0.1) is False
    assert child.code == -signal.SIGKILL


async def test_a_child_has_its_own_process_group_and_share_of_the_cores(tmp_path):
    child = ChildProcess("a", ["sleep", "60"], tmp_path / "a")
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()
    assert os.getsid(child.pid) == child.pid  # by which a kernel with autogroup distributes cores
    await child.stop(10.0)


def test_a_child_dies_with_its_parent_however_the_parent_ends(tmp_path):
    """Seen failing without the prctl call in leash.py."""
    code = (
        "import os, pathlib, sys, time; from common.process.children import ChildProcess\n"
        "command = ['sh', '-c', 'echo up; exec sleep 60']\n"
        "child = ChildProcess('a', command, pathlib.Path(sys.argv[1]))\n"
        "while not child.last_lines(): time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    child = int(parent.stdout)
    try:
        await_end(child)
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)


async def test_a_missing_program_is_a_failed_child(tmp_path):
    child = ChildProcess("a", ["/no/such/program"], tmp_path / "a")
    assert await child.ended() == 1
    assert "/no/such/program" in child.last_lines() or "No such file" in child.last_lines()


async def test_waiting_for_the_end_of_a_child_can_be_cancelled(tmp_path):
    child = ChildProcess("a", ["sleep", "60"], tmp_path / "a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.ended()
    assert child.code is None
    await child.stop(10.0)


async def test_new_log_lines_of_starting_processes_are_reported_once():
    text = "2026-11-30T19:51:23Z INFO decode engine.cpu: compiling: 1 of 2"
    as_json = '{"level": "info", "message": "compiling: 2 of 2"}'
    lines = ["", text, text, as_json, as_json, text]
    starting = SimpleNamespace(name="decode-0", last_lines=lambda count: lines.pop(0))
    reported: list[tuple[str, str]] = []
    with pytest.raises(IndexError):
        await report_progress([starting], lambda *each: reported.append(each), 0.0)
    messages = ["compiling: 1 of 2", "compiling: 2 of 2", "compiling: 1 of 2"]
    assert reported == [("decode-0", message) for message in messages]

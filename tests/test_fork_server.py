"""A process of the fork server is a child process like one started by exec."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from common.process.children import ChildProcess
from tests.support.processes import fork_server
from tests.support.processes.cluster import children_of

PR_GET_PDEATHSIG = 2
LIBRARY = "has the library of tracing"  # whose import takes long


def facts() -> dict[str, object]:
    """Return everything that a process can observe of its start."""
    at_parents_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(at_parents_death), 0, 0, 0)
    return {
        "arguments": sys.argv[1:],
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "at its parent's death": at_parents_death.value,
        "directory": os.getcwd(),
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "variable": os.environ.get("A_VARIABLE"),
        "threads": len(os.listdir("/proc/self/task")),
        LIBRARY: "opentelemetry" in sys.modules,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def _start(printed):
    return {name: fact for name, fact in json.loads(printed).items() if name != LIBRARY}


def test_a_forked_process_has_the_arguments_files_environment_and_parent_of_an_execed_one(
    monkeypatch,
):
    monkeypatch.setenv("A_VARIABLE", "of this test")
    ran = fork_server.run(__spec__.name, "one", "--two=3")
    command = [sys.executable, "-m", __spec__.name, "one", "--two=3"]
    execed = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    leashed = {"leads its session": True, "at its parent's death": signal.SIGTERM}
    assert _start(ran.stdout) == _start(execed.stdout) | leashed


def test_a_server_outlives_the_thread_that_first_used_it():
    """The server has imported all programs. They load the tracing library only when they use it."""
    environment = {**os.environ, "TORCH_OF_THIS_TEST": "1"}  # a server of its own
    ended = []

    def ask():
        ended.append(fork_server.run(__spec__.name, environment=environment))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ask()
    assert [program.returncode for program in ended] == [0, 0]
    assert not any(json.loads(each.stdout)[LIBRARY] for each in ended)


def test_the_server_has_one_thread_for_any_number_of_library_threads():
    # like `make attack`, which has no conftest
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = fork_server.run(__spec__.name, environment=environment)
    assert json.loads(ran.stdout)["threads"] == 1


@pytest.mark.long
def test_children_are_listed_while_threads_end():
    over = threading.Event()

    def start_threads() -> None:
        while not over.is_set():
            threading.Thread(target=int).start()

    starter = threading.Thread(target=start_threads)
    starter.start()
    try:
        assert all(isinstance(children_of(os.getpid()), list) for _ in range(3000))
    finally:
        over.set()
        starter.join()


def test_a_program_of_a_cluster_ends_with_the_same_code_and_log(tmp_path):
    command = [sys.executable, "-m", "router", "--model=m", "--port=x"]
    ends = []
    for name in ("forked", "execed"):
        log = tmp_path / name
        if name == "forked":
            with fork_server.in_use():
                child = ChildProcess(name, command, log)
        else:
            child = ChildProcess(name, command, log)
        ends.append((child._process.wait(), log.read_text()))
    assert ends[0] == ends[1]
    assert ends[0][0] == 2 and "--port" in ends[0][1]


def test_a_forked_process_can_be_stopped_and_killed(tmp_path):
    flags = ["--model=/nonexistent", "--port=1"]
    with fork_server.in_use():
        child = ChildProcess("router", [sys.executable, "-m", "router", *flags], tmp_path / "log")
    child.send(signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and child.code is None
    child.send(signal.SIGKILL)
    assert child._process.wait(60.0) == child.code == -signal.SIGKILL
    child.send(signal.SIGKILL)  # no effect


if __name__ == "__main__":
    print(json.dumps(facts()))

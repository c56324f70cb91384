"""A fork server: the processes of a cluster start without importing torch and the engine again.

    with fork_server.in_use():
        child = Child("decode-0", [sys.executable, "-m", "decode_node", *flags], log, ...)

Imports take most of the CPU time of a short cluster test. The server is a process that has imported
everything, has one thread, and forks. A program that it starts becomes a child of the calling
process: its pid, exit code, signals, output, session and parent-death signal are the same as after
exec. The engine process of a node is forked too, by its frontend. The followers of an engine are
forked if the engine runs in the calling process. `baton up`, `baton bench` and a
router with several processes fork a server of their own, which starts their processes. All other
commands and processes are started by exec.

`python -m tests.support.processes.fork_server DESCRIPTOR` is the server. A worker of `--workers`
forks its server from itself, because it has imported everything already.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from multiprocessing import connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

from common.process import children, leash
from common.process.leash import follow_parent

# Nodes, and the engine that each of them starts.
_ENGINES = {
    "prefill_node": "node.engine_main",
    "decode_node": "node.engine_main",
    "tests.support.processes.stub_node": "tests.support.engine.stub_engine",
}
_FOLLOWER = "node.follower"
_ROUTER_PROCESS = "api.program.serving"
PROGRAMS = {"cli.up", "router", _ROUTER_PROCESS, _FOLLOWER, *_ENGINES}
_PASSED_FILES = {_FOLLOWER, _ROUTER_PROCESS}  # the programs that may inherit further files
_MODULE = "tests.support.processes.fork_server"  # whose name is another one in a server
_NAME = "fork server"  # of the process of a server
# Variables that an interpreter or a library reads when it is loaded: each combination needs its own
# server. A server has not loaded UCX, and engines of tests set HF_DEACTIVATE_ASYNC_LOAD.
_EARLY = (
    "PYTHONHASHSEED",
    "LD_",
    "OMP_",
    "GOMP_",
    "MALLOC_",
    "TORCH",
    "TRITON",
    "GRPC_ENABLE_FORK",
    "HF_HOME",
    "HF_HUB_",
)
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_START_S = 120.0  # seconds for the imports, on a busy machine
_MESSAGE_BYTES = 1 << 17
_MOST_FILES = 16


@contextlib.contextmanager
def in_use(starter: ModuleType = children) -> Iterator[None]:
    """Start programs through a fork server while inside the context.

    Args:
        starter: module that starts them: of `ChildProcess`, or of the followers of an engine.
    """
    before = starter.subprocess
    starter.subprocess = _subprocess_with(_start_program)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        starter.subprocess = before  # type: ignore[attr-defined]


class _Forked:
    """The part of `subprocess.Popen` that callers use, for a forked child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not connection.wait([ended], timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(ended)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, options)
                if pid == self.pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code


def programs_below(pid: int) -> list[int]:
    """Return the pids of the child processes of a program's first thread, without a server."""
    ended = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    found, listed = [], ""
    with ended:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for child in listed.split():
        with ended:
            if Path(f"/proc/{child}/comm").read_text().strip() != _NAME:
                found.append(int(child))
    return found


def run(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    stdout: IO[bytes] | None = None,
    timeout_s: float = 120.0,
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m MODULE ARGUMENTS` to its end, and return its exit code and output.

    `cli.main` continues as the command that it would exec.

    Args:
        environment: environment of the program. None: that of this process.
        directory: working directory of the program. None: that of this process.
        stdout: file for the program's output, if it is not returned.
    """
    with contextlib.ExitStack() as files:
        nothing = files.enter_context(open(os.devnull, "rb"))
        output, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        standard = (nothing.fileno(), (stdout or output).fileno(), errors.fileno())
        program = start(
            module,
            arguments,
            environment or {**os.environ},
            directory or Path.cwd(),
            standard,
        )
        try:
            code = program.wait(timeout_s)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
        return subprocess.CompletedProcess([module, *arguments], code, *said)


def _start_program(command: Sequence[str], **how: Any) -> "_Forked | subprocess.Popen[bytes]":
    module, arguments, at_end = _of_leashed(command)
    passed = how.get("pass_fds", ())
    if module not in PROGRAMS or (passed and module not in _PASSED_FILES):
        return subprocess.Popen(command, **how)
    environment = how.get("env") or {**os.environ}
    output = 1 if how.get("stdout") is None else how["stdout"].fileno()
    errors = output if how.get("stderr") is subprocess.STDOUT else 2
    with open(os.devnull, "rb") as nothing:
        standard = (nothing.fileno(), output, errors)
        directory = how.get("cwd") or Path.cwd()
        return start(module, arguments, environment, directory, standard, passed, at_end)


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    standard: Sequence[int],
    passed: Sequence[int] = (),
    at_end: int = signal.SIGTERM,
) -> "_Forked":
    """Start `python -m MODULE ARGUMENTS`.

    Args:
        standard: descriptors of stdin, stdout and stderr.
        passed: further descriptors, which keep their numbers.
        at_end: signal that the program gets when this process ends.
    """
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "directory": str(directory),
        "numbers": [0, 1, 2, *passed],
        "at_end": at_end,
    }
    return _Server.of(_early(environment)).ask(request, [*standard, *passed])


def _early(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    # Libraries start one thread per core when they are loaded. A process with threads cannot fork.
    single = {**environment, "OMP_NUM_THREADS": "1"}
    single.pop("OMP_WAIT_POLICY", None)  # which `baton up` sets, and which changes only the speed
    return tuple(sorted((k, v) for k, v in single.items() if k.startswith(_EARLY)))


def _of_leashed(command: Sequence[str]) -> tuple[str, list[str], int]:
    """Return module, arguments and signal of a command for leash.py, or empty values."""
    match list(command):
        case [_, "-I", "-S", script, _, number, sys.executable, *rest] if script == leash.__file__:
            match rest:
                case ["-m", module, *arguments] | ["-P", "-m", module, *arguments]:
                    return module, arguments, int(number)
    return "", [], 0


def fork_from_this_process() -> None:
    """Fork the server of programs that have this process's early variables.

    Call this in a process with one thread, before it starts anything.
    """
    _servers[_early(os.environ)] = _Server(_fork)


_servers: dict[tuple[tuple[str, str], ...], "_Server"] = {}


class _Server:
    """A server process, as its client uses it.

    Args:
        start: starts the server with one end of a socket.
    """

    _asking = threading.Lock()  # of all servers, because adoption concerns the whole process

    @staticmethod
    def of(early: tuple[tuple[str, str], ...]) -> "_Server":
        if early not in _servers:
            _servers[early] = _Server(partial(_exec, dict(early)))
        return _servers[early]

    def __init__(self, start: "Callable[[socket.socket], subprocess.Popen[bytes] | _Forked]"):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_S)
        with theirs:
            self._process = start(theirs)
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def ask(self, request: Mapping[str, object], files: Sequence[int]) -> _Forked:
        """Start a program with these open files. Raises EOFError if the server ended."""
        with self._asking:
            # The process that forked the program has ended before the reply, so it is now our
            # child.
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                reply = self._socket.recv(64)
            finally:
                _adopt_orphans(False)
        if not reply:
            raise EOFError(f"the fork server ended with {self._process.wait()}")
        return _Forked(int(reply))


def _exec(early: Mapping[str, str], theirs: socket.socket) -> "subprocess.Popen[bytes]":
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_EARLY)}
    # Without leash.py, which would also end with the calling thread. The server ends when this
    # process, and so the other end of the socket, has ended.
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env=kept | early,
        pass_fds=[theirs.fileno()],
    )


def _fork(theirs: socket.socket) -> _Forked:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _be_like_new(theirs.fileno())
            main(theirs.fileno())
            code = 0
        except BaseException:  # noqa: BLE001  this process must not become another worker
            traceback.print_exc()
        finally:
            os._exit(code)
    return _Forked(pid)


def _be_like_new(kept: int) -> None:
    """Undo pytest's changes to this process, and close its files except one."""
    faulthandler.disable()
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.meta_path[:] = [each for each in sys.meta_path if "_pytest" not in type(each).__module__]
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    # A library that configures logs could close them later, when other files have their numbers.
    logging.shutdown()
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 16)


def _adopt_orphans(adopt: bool) -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def _subprocess_with(start: object) -> SimpleNamespace:
    """Return a copy of the module `subprocess` with another Popen."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": start})


# Runs in the server.


def main(descriptor: int) -> None:
    """Serve until the client closes its socket."""
    requests = socket.socket(fileno=descriptor)
    starter = os.getppid()
    os.setsid()  # a signal to the starter's process group must not end it
    _set_name(_NAME)
    while True:
        text, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _MOST_FILES)
        if not text:
            return
        _import_programs()
        request = json.loads(text)
        program = _fork_for(starter, request["at_end"])
        if program is None:
            requests.close()
            _run_program(request, files)
        for file in files:
            os.close(file)
        requests.send(str(program).encode())


@cache
def _import_programs() -> None:
    import api.program.processes
    import api.program.serving  # noqa: F401
    import decode_node.engine
    import decode_node.program  # noqa: F401
    import engine.follower  # noqa: F401
    import node.roles  # noqa: F401
    import prefill_node.engine
    import prefill_node.program  # noqa: F401

    (thread,) = os.listdir("/proc/self/task")
    assert int(thread) == os.getpid(), "a thread before the fork"
    assert "nixl._api" not in sys.modules, "UCX before the fork"
    gc.collect()
    gc.freeze()


def _fork_for(starter: int, at_end: int) -> int | None:
    """Fork a child of `starter`, a subreaper. It gets the signal `at_end` when `starter` ends.

    Returns its pid, or None in the child itself.
    """
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        with contextlib.suppress(ProcessLookupError):  # it has ended and was waited for
            ended = os.pidfd_open(between)
            connection.wait([ended])
            os.close(ended)
        follow_parent(starter, at_end)
        return None
    os.waitpid(between, 0)
    pid = int(os.read(read, 64))
    os.close(read)
    os.close(write)
    return pid


def _set_name(name: str) -> None:
    """Set the name that `ps` shows for this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _starts_others(module: str, arguments: Sequence[str]) -> bool:
    """Return whether a program starts some of PROGRAMS, other than the engine of a node."""
    return module in ("cli.up", "bench") or (
        module == "router" and any(each.startswith("--processes") for each in arguments)
    )


def _run_program(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    os.setsid()
    os.chdir(request["directory"])
    _place(files, request["numbers"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _use_python_path()
    module = request["module"]
    _set_name(module)
    if module in _ENGINES:
        _fork_engine(_ENGINES[module])
    elif _starts_others(module, request["arguments"]):
        fork_from_this_process()
        children.subprocess = _subprocess_with(_start_program)  # type: ignore[assignment]
    os.execv = _run_instead  # type: ignore[assignment]
    _run_module(module, request["arguments"])


def _use_python_path() -> None:
    """Import from the folders of PYTHONPATH, as a new interpreter does."""
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
            if (customise := Path(folder, "sitecustomize.py")).exists():
                runpy.run_path(str(customise), run_name="sitecustomize")


def _run_instead(path: str, command: Sequence[str]) -> NoReturn:
    """Run the module that `baton` would exec, without a new interpreter."""
    match list(command):
        case [sys.executable, "-P", "-m", module, *arguments]:
            _run_module(module, arguments)
    os.execvp(path, command)


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open files to these descriptor numbers."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module as this process's program, and exit.

    Skips the interpreter's finalisation, which with torch would cost as much as the imports.
    """
    sys.argv = [module, *arguments]
    # If a test has imported the module, or one that it runs, that module runs again as a program.
    for name in [each for each in sys.modules if each == module or each.endswith(".__main__")]:
        if not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  like the interpreter
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_engine(engine: str) -> None:
    """Fork the engine for the frontend that this process becomes, while it has one thread."""
    from node.frontend import frontend

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    front = os.getpid()
    meant_for_front = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, meant_for_front)
    pid = os.fork()
    if pid == 0:
        ours.close()
        follow_parent(front, signal.SIGKILL)
        _run_engine(engine, theirs)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()

    def start(command: Sequence[str], **how: Any) -> _Forked:
        module, arguments, _ = _of_leashed(command)
        assert module == engine, command
        request = {
            "arguments": arguments,
            "environment": dict(how["env"]),
            "numbers": how["pass_fds"],
        }
        with ours:
            socket.send_fds(ours, [json.dumps(request).encode()], how["pass_fds"])
        return _Forked(pid)

    frontend.subprocess = _subprocess_with(start)  # type: ignore[assignment]


def _run_engine(engine: str, requests: socket.socket) -> NoReturn:
    with requests:
        text, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _MOST_FILES)
    if text:
        request = json.loads(text)
        _place(files, request["numbers"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _run_module(engine, request["arguments"])
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

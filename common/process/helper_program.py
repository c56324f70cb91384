"""The helper's end of helper.py.

It forks a process per question from this one, which has loaded all that they need.
"""

import os
import resource
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.process.helper import ANSWERED, CRASHED, NO_MEMORY, Answer, Question
from common.process.leash import follow_parent

_NICENESS = 10  # lower CPU priority than serving processes
_STATM = Path("/proc/self/statm")
Work = Callable[[bytes], bytes]


class _Running(NamedTuple):
    """The process of one question. Its result is in the file."""

    pid: int
    result: int
    asker: Connection


def serve(descriptors: Sequence[str], work: Work) -> None:
    """Answer questions until the other end of the descriptors closes.

    Args:
        descriptors: one for each lane.
        work: returns the answer to a question's content. Raises MemoryError if memory is short.
    """
    os.nice(_NICENESS)
    askers = [Connection(int(each)) for each in descriptors]
    running: dict[int, _Running] = {}  # by descriptor of their processes
    while True:
        for ready in wait([*askers, *running]):
            if isinstance(ready, int):
                _report(running.pop(ready))
                os.close(ready)
                continue
            assert isinstance(ready, Connection)
            try:
                question = msgspec.msgpack.decode(ready.recv_bytes(), type=Question)
            except (EOFError, OSError):
                return
            begun = _begin(question, ready, work)
            running[os.pidfd_open(begun.pid)] = begun


def _begin(question: Question, asker: Connection, work: Work) -> _Running:
    result = os.memfd_create("answer")
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = CRASHED
        try:
            follow_parent(parent, signal.SIGKILL)  # a fork does not inherit this setting
            code = _answer(question, work, result)
        finally:
            os._exit(code)
    return _Running(pid, result, asker)


def _report(ended: _Running) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1])
    try:
        content = b""
        if code == ANSWERED:
            content = os.pread(ended.result, os.fstat(ended.result).st_size, 0)
    finally:
        os.close(ended.result)
    ended.asker.send_bytes(msgspec.msgpack.encode(Answer(code, content)))


def _answer(question: Question, work: Work, result: int) -> int:
    """Process a question in the forked process. Returns its exit code."""
    most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + question.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (question.cpu_s, question.cpu_s))
    try:
        left = memoryview(work(question.content))
    except MemoryError:
        return NO_MEMORY
    while left:
        left = left[os.write(result, left) :]
    return ANSWERED

"""A program beside an engine, in which guides are tried before the engine compiles them.

    python -m common.engine.features.trials DIRECTORY VOCABULARY EOS,EOS DESCRIPTOR...

What compiles a grammar cannot be stopped, and a guide of a few characters can keep it busy for
hours, take all memory or overflow its stack. So each is compiled first in a process of its own,
forked from this one, which has the vocabulary ready: the kernel ends it when it has used its share
of a core or of memory. Nothing of what it has made is kept. Ends when its descriptors do.
"""

import os
import resource
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from common.engine.features.compilers import Compilers
from common.engine.features.prover import MAX_BYTES, Trial
from common.errors import InvalidRequest

_NICENESS = 10  # an engine goes before
_STATM = Path("/proc/self/statm")


def main(directory: str, vocabulary: str, eos: str, *descriptors: str) -> None:
    eos_token_ids = [int(token) for token in eos.split(",") if token]
    compilers = Compilers.of_model(Path(directory), int(vocabulary), eos_token_ids)
    os.nice(_NICENESS)
    askers = [Connection(int(each)) for each in descriptors]
    running: dict[int, tuple[int, Connection]] = {}  # by descriptor of its process
    while True:
        for ready in wait([*askers, *running]):
            if isinstance(ready, int):
                pid, asker = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                asker.send_bytes(str(code).encode())
                continue
            assert isinstance(ready, Connection)
            try:
                trial = msgspec.msgpack.decode(ready.recv_bytes(), type=Trial)
            except EOFError:
                return
            pid = os.fork()
            if pid == 0:
                os._exit(_tried(compilers, trial))
            running[os.pidfd_open(pid)] = pid, ready


def _tried(compilers: Compilers, trial: Trial) -> int:
    """In the forked process. 0: it ended, be it with a refusal; 1: there was no memory; a signal
    ends what takes too long."""
    size = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, size + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (trial.cpu_s, trial.cpu_s))
    try:
        compilers.compiled(trial.guide)
    except InvalidRequest as error:
        return int("bad_alloc" in str(error))
    except MemoryError:
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The program of a test's helper process: it does what the first word of a request says."""

import os
import signal
import sys
import time

from common.process import helper


def work(content: bytes) -> bytes:
    verb, _, rest = content.partition(b" ")
    match verb:
        case b"echo":
            return rest
        case b"spin":
            while True:
                pass
        case b"fill":
            return bytes(1 << 30)[:1]
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"orphan":  # returns its pid, and stays
            with open(rest, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
    raise ValueError(f"no such work: {verb!r}")


if __name__ == "__main__":
    helper.serve(sys.argv[1:], work)

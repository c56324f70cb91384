"""`baton up` as a process, and a client of its router's HTTP port."""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.cluster import free_ports, free_row
from tests.support.processes.programs import Program

WAIT_S = 180.0
MOST_DECODE = 4  # decode nodes, whose ports are consecutive


class Router:
    """Client of a router's HTTP port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=WAIT_S) as answer:
            return json.load(answer)

    def post(self, path: str, **fields: Any) -> bytes:
        header = {"content-type": "application/json"}
        asked = urllib.request.Request(self._url + path, json.dumps(fields).encode(), header)
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return bytes(answer.read())

    def streamed(self, model: str, prompt: str) -> str:
        """Return the text of a streamed, greedy completion."""
        how = {"max_tokens": 24, "temperature": 0, "stream": True}
        body = self.post("/v1/completions", model=model, prompt=prompt, **how)
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return "".join(each["choices"][0]["text"] for each in map(json.loads, events))


class Up(Program):
    """`baton up`.

    Attributes:
        router, decode: addresses of the router and of the first decode node.
        http_port: the router's.
    """

    def __init__(self, var: Path, *flags: str, forked: bool = True, num_pages: int = 64) -> None:
        """Args:
        forked: start it and its processes from the fork server.
        """
        router, self.http_port, prefill = free_ports(3)
        decode = free_row(MOST_DECODE)[0]
        self.router, self.decode = f"127.0.0.1:{router}", f"127.0.0.1:{decode}"
        super().__init__(
            "cli.up",
            f"--var={var}",
            f"--port={router}",
            f"--http-port={self.http_port}",
            f"--prefill-port={prefill}",
            f"--decode-port={decode}",
            "--device=cpu",
            f"--engine.cache.num-pages={num_pages}",
            *flags,
            forked=forked,
        )


@contextmanager
def running(var: Path, *flags: str) -> Iterator[tuple[Router, Up]]:
    """Run `baton up` with these flags. Its router needs no API key."""
    up = Up(var, *flags)
    try:
        up.line_with("Ready.", WAIT_S)
        yield Router(up.http_port), up
    finally:
        up.send(signal.SIGCONT)
        up.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.05)

"""`baton up`, as a terminal runs it."""

import json
import os
import shlex
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from cli.demo_model import write
from tests.support.cluster import children_of, free_ports
from tests.support.programs import Program, await_end, runs
from tests.support.sockets import OpenSocket, sockets_of

START_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "model"
    write(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started = []

    def run_up(*flags: str) -> Program:
        router, http, prefill, decode = free_ports(4)
        program = Program(
            "cli.up",
            f"--var={tmp_path}",
            f"--port={router}",
            f"--http-port={http}",
            f"--prefill-port={prefill}",
            f"--decode-port={decode}",
            "--device=cpu",
            "--engine.cache.num-pages=64",
            *flags,
        )
        started.append(program)
        return program

    yield run_up
    for program in started:
        program.close()


def _programs(pid: int) -> dict[str, int]:
    """Pids of the programs that a process has started, and of those that they have started."""
    found = {}
    for child in children_of(pid):
        command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        found |= {command[command.index("-m") + 1]: child} | _programs(child)
    return found


def _serving(up: Program) -> dict[str, int]:
    up.line_with("Ready.", START_S)
    children = _programs(up.pid)
    assert set(children) == {
        "router",
        "prefill_node",
        "prefill_node.engine",
        "decode_node",
        "decode_node.engine",
    }
    return children


def _answered(curl: str) -> dict[str, Any]:
    """What the server says to this command line of curl."""
    match shlex.split(curl):
        case ["curl", url, "-H", header, "-d", body]:
            name, value = header.split(": ")
            asked = urllib.request.Request(url, body.encode(), {name: value})
            with urllib.request.urlopen(asked, timeout=10) as answer:
                content: dict[str, Any] = json.load(answer)
                return content
    raise AssertionError(curl)


def test_it_serves_the_demo_model_answers_a_sample_and_ends_without_a_trace(run, tmp_path):
    up = run()
    children = _serving(up)
    assert "> add 27 15 =\n 42\n" in up.output
    assert up.line_with("grpcurl -plaintext -d '{")
    secret = tmp_path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    for pid in children.values():  # which everybody on this machine may read
        assert secret.read_text().strip() not in Path(f"/proc/{pid}/cmdline").read_text()
    for role in ("router", "prefill-0", "decode-0"):
        assert "secret=on" in (tmp_path / "log" / f"{role}.log").read_text()
    answer = _answered(up.line_with("curl http"))
    assert answer["model"] == "baton-demo"
    assert answer["choices"][0]["text"].strip() == "42"
    up.send(signal.SIGINT)
    assert up.exit_code() == 0, up.output
    assert not [pid for pid in children.values() if runs(pid)]


# "What listens" in docs/tls.md. Seen failing with "tcp" among the transports of agents: two more of
# each engine, one of them on all interfaces.
def test_what_others_can_send_to_is_what_the_docs_say_on_the_host_asked_for(run, model):
    metrics, pages = free_ports(2)
    up = run(f"--model={model}", f"--metrics-port={metrics}", f"--transfer.data-port={pages}")
    children = _serving(up)
    _answered(up.line_with("curl http"))  # by now a path between the nodes has been proved
    found = {name: sockets_of(pid) for name, pid in children.items()}
    # Of the engines: where prefill nodes serve pages over `tcp`, and what UCX names by itself.
    (agent, data) = OpenSocket("unix", ANY, 0), OpenSocket("tcp", "127.0.0.1", pages)
    assert found.pop("prefill_node.engine") == [data, agent]
    assert found.pop("decode_node.engine") == [agent]
    for number, (name, flags) in enumerate(
        {
            "router": ["--port", "--http-port"],
            "prefill_node": ["--port"],
            "decode_node": ["--port"],
        }.items()
    ):
        ports = [metrics + number, *(int(_flag(children[name], flag)) for flag in flags)]
        assert set(found[name]) == {OpenSocket("tcp", "127.0.0.1", port) for port in ports}
    assert sockets_of(up.pid) == []


def _flag(pid: int, name: str) -> str:
    """What a program has been given."""
    (value,) = [
        argument.removeprefix(f"{name}=")
        for argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if argument.startswith(f"{name}=")
    ]
    return value


def test_a_program_that_dies_is_told_with_the_end_of_its_log_and_ends_all(run, model):
    up = run(f"--model={model}")
    children = _serving(up)
    os.kill(children["decode_node"], signal.SIGKILL)
    assert up.exit_code() == 1
    assert "decode-0 has ended with code -9" in up.output
    assert "common.node.front: ready" in up.output  # a line of that log
    assert not [pid for pid in children.values() if runs(pid)]


def test_when_it_is_killed_nothing_stays(run, model):
    up = run(f"--model={model}")
    children = _serving(up)
    up.send(signal.SIGKILL)
    up.exit_code()
    for pid in children.values():
        await_end(pid, 20.0)

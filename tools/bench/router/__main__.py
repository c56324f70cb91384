"""Measure a router's CPU per request, stream and token, compared with the Rust routers.

    python -m tools.bench.router                  about four minutes. Installs the peers once
    python -m tools.bench.router --no-peers       Baton alone

Behind every router, stubs respond without delay (tools/bench/router/behind.py). The clients run in
a process of their own. All routers are pinned to one core and run at the same time; all other
processes use the other cores. The routers take turns, `--rounds` times, and the cheapest turn
counts. CPU is the kernel's accounting for the router's processes: unlike wall time it hardly
changes when the machine has other work.

Logs are at "warning" for all, and requests are distributed round robin. Goals: 100 us for a plain
request; not more than the Rust routers for a streamed one of prefill and decode; 20,000 token
events a second and core (50 us for each).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.api.models import byte_level_tokenizer
from tests.support.processes.cluster import children_of
from tools.bench.router import peers
from tools.bench.router.clients import MODEL, SENTENCE, Load
from tools.bench.support.record import ROOT, emit, parsed, say, show
from tools.bench.support.systems import cpu_seconds_of, free_addresses

READY_S = 60.0
LOADS = {
    "plain": Load("http", 1, stream=False),
    "plain, 1 client": Load("http", 1, stream=False, clients=1),
    "plain, 1 kB prompt": Load("http", 1, stream=False, prompt=SENTENCE * 18),
    "8 tokens": Load("http", 8, stream=True),
    "256 tokens": Load("http", 256, stream=True),
    "256 tokens, whole": Load("http", 256, stream=False),
    "gRPC, 1 token": Load("grpc", 1, stream=True),
    "gRPC, 8 tokens": Load("grpc", 8, stream=True),
    "gRPC, 256 tokens": Load("grpc", 256, stream=True),
}
_Process = subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class MeasuredRouter:
    """A running router."""

    name: str
    pid: int
    targets: Mapping[str, str]  # by protocol

    def cpu_s(self) -> float:
        return sum(map(cpu_seconds_of, _family(self.pid)))


def main() -> None:
    options = parsed(
        "router",
        __doc__,
        ("--no-peers", False, "Baton alone"),
        ("--loads", LOADS, "loads to measure"),
        ("--rounds", 3, "turns of each router, of which the cheapest counts"),
        ("--seconds", 2.0, "seconds of one turn"),
    )
    cores = sorted(os.sched_getaffinity(0))
    own, rest = cores[:1], cores[1:] or cores
    wheels = {} if options.no_peers else peers.installed()
    with contextlib.ExitStack() as exits:
        model = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        _write_model(model)

        def beside(module: str) -> _Process:
            command = (sys.executable, "-m", module)
            return exits.enter_context(_program(rest, *command, talks=True))

        clients = beside("tools.bench.router.clients")
        node, *workers = json.loads(_line(beside("tools.bench.router.behind")))
        routers = []
        for name, level in (("baton", "warning"), ("baton, logging", "info")):
            targets, flags = _baton(model, node, level)
            process = exits.enter_context(_program(own, sys.executable, "-m", "router", *flags))
            routers.append(MeasuredRouter(name, process.pid, targets))
        addresses = free_addresses(peers.ADDRESSES)
        for name, (command, target) in peers.commands(wheels, addresses, workers).items():
            process = exits.enter_context(_program(own, *command))
            routers.append(MeasuredRouter(name, process.pid, {"http": target}))
        for router in routers:
            _until_ready(router)
        rows = [row for load in options.loads for row in _measured(load, routers, clients, options)]
    show(rows)
    emit("router", vars(options), rows, goals=_goals(rows))


def _measured(
    name: str, routers: Sequence[MeasuredRouter], clients: _Process, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the cheapest turn of each router with one load. The routers take turns."""
    load = LOADS[name]
    able = [router for router in routers if load.protocol in router.targets]
    turns: dict[str, list[dict[str, Any]]] = {router.name: [] for router in able}
    for _ in range(options.rounds):
        for router in able:
            turns[router.name].append(_turn(router, load, clients, options.seconds))
    best = {name: min(of, key=lambda turn: turn["us_per_request"]) for name, of in turns.items()}
    ours = best["baton"]["us_per_request"]
    say(f"{name}: done")
    return [
        {"load": name, "system": system, "ratio": round(row["us_per_request"] / ours, 2), **row}
        for system, row in best.items()
    ]


def _turn(router: MeasuredRouter, load: Load, clients: _Process, seconds: float) -> dict[str, Any]:
    order = replace(load, target=router.targets[load.protocol], seconds=seconds)
    before = router.cpu_s()
    assert clients.stdin is not None
    clients.stdin.write(msgspec.json.encode(order).decode() + "\n")
    clients.stdin.flush()
    counts = json.loads(_line(clients))
    spent_s, wall_s = router.cpu_s() - before, counts["wall_s"]
    if not counts["requests"]:
        raise SystemExit(f"{router.name} has answered nothing")
    return {
        "us_per_request": round(1e6 * spent_s / counts["requests"], 1),
        "us_per_token": round(1e6 * spent_s / counts["tokens"], 1),
        "requests_per_s": round(counts["requests"] / wall_s, 1),
        "tokens_per_s": round(counts["tokens"] / wall_s, 1),
        "core": round(spent_s / wall_s, 2),
        "failed": counts["failed"],
    }


def _goals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours = {row["load"]: row for row in rows if row["system"] == "baton"}
    streamed = [
        row["us_per_request"]
        for row in rows
        if row["load"] == "8 tokens" and row["system"].endswith(" PD")
    ]
    goals: dict[str, Any] = {}
    if "plain" in ours:
        goals["plain_us"] = {"goal": 100, "is": ours["plain"]["us_per_request"]}
    if streamed and "8 tokens" in ours:
        goals["streamed_us"] = {"goal": min(streamed), "is": ours["8 tokens"]["us_per_request"]}
    for load, name in (("256 tokens", "sse"), ("gRPC, 256 tokens", "grpc")):
        if load in ours:
            per_s = round(1e6 / ours[load]["us_per_token"])
            goals[f"{name}_tokens_per_core_s"] = {"goal": 20_000, "is": per_s}
    return goals


# Processes.


def _baton(model: Path, node: str, log_level: str) -> tuple[dict[str, str], list[str]]:
    """Return the addresses by protocol and the flags of Baton's router."""
    grpc, http = free_addresses(2)
    flags = [
        f"--model={model}",
        f"--served-model-name={MODEL}",
        f"--decode={node}",
        f"--port={grpc.rpartition(':')[2]}",
        f"--http-port={http.rpartition(':')[2]}",
        "--policy=round_robin",
        f"--log-level={log_level}",
    ]
    return {"grpc": grpc, "http": http}, flags


@contextlib.contextmanager
def _program(cores: Sequence[int], *command: str, talks: bool = False) -> Iterator[_Process]:
    """Run a process on these cores while inside the context.

    Args:
        talks: connect stdin and stdout. Otherwise its output is discarded.
    """
    stream = subprocess.PIPE if talks else subprocess.DEVNULL
    process = subprocess.Popen(
        ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
        cwd=ROOT,
        env={**os.environ, "RUST_LOG": "warn", "PYTHONPATH": sysconfig.get_path("purelib")},
        stdin=stream,
        stdout=stream,
        stderr=None if talks else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(process: _Process) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args!r} has ended")
    return line


def _until_ready(router: MeasuredRouter) -> None:
    """Wait until the router serves a request, because routers define readiness differently."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    url = f"http://{router.targets['http']}/v1/completions"
    ask = urllib.request.Request(url, body, {"content-type": "application/json"})
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(ask, timeout=5.0):
                return
        except OSError as error:  # URLError too
            if time.monotonic() > deadline:
                raise SystemExit(f"{router.name} does not come up: {error}") from None
            time.sleep(0.2)


def _write_model(directory: Path) -> None:
    """Write the checkpoint files that a router reads."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": 8192, "vocab_size": 320, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))


def _family(pid: int) -> list[int]:
    return [pid, *(each for child in children_of(pid) for each in _family(child))]


if __name__ == "__main__":
    main()

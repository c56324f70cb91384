"""Measure a router's CPU per request, stream and token, compared with the Rust routers.

    python -m tools.bench.router                  about four minutes; installs the peers once
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
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.api.models import byte_level_tokenizer
from tools.bench.router import peers
from tools.bench.router.clients import SENTENCE, Load
from tools.bench.support.record import ROOT, emit, say, table
from tools.bench.support.systems import cpu_seconds_of, free_addresses

READY_S = 60.0
MODEL = "stub"
COLUMNS = {
    "load": "{load}",
    "router": "{system}",
    "us/request": "{us_per_request:.0f}",
    "x Baton": "{ratio:.2f}",
    "us/token": "{us_per_token:.1f}",
    "requests/s": "{requests_per_s:.0f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "of a core": "{core:.0%}",
    "failed": "{failed}",
}


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


@dataclass(frozen=True, slots=True)
class System:
    """A running router."""

    name: str
    pid: int
    targets: Mapping[str, str]  # by protocol

    def cpu_s(self) -> float:
        return sum(map(cpu_seconds_of, _family(self.pid)))


def main() -> None:
    options = _options()
    cores = sorted(os.sched_getaffinity(0))
    rest = cores[1:] or cores
    wheels = {} if options.no_peers else peers.installed(options.cache)
    with tempfile.TemporaryDirectory(prefix="baton-bench-router-") as made:
        model = _write_model(Path(made))
        with contextlib.ExitStack() as programs:
            behind, clients = (
                programs.enter_context(_program(rest, sys.executable, "-m", *command, talks=True))
                for command in (
                    ("tools.bench.router.behind", "--http-workers=3"),
                    ("tools.bench.router.clients",),
                )
            )
            node, *workers = json.loads(_line(behind))
            _line(clients)
            quiet = "--log-level=warning"
            routers = [("baton", "router", quiet), ("baton, logging", "router", "--log-level=info")]
            systems = [
                programs.enter_context(
                    _baton(cores[:1], options.python, module, model, node, name, level)
                )
                for name, module, level in routers
            ]
            addresses = free_addresses(peers.ADDRESSES)
            for name, (command, target) in peers.commands(wheels, addresses, workers).items():
                peer = programs.enter_context(_program(cores[:1], *command))
                systems.append(System(name, peer.pid, {"http": target}))
            for system in systems:
                _until_ready(system)
            rows = _measured(systems, clients, options)
    table(rows, COLUMNS)
    emit("router", {**vars(options), "cache": str(options.cache)}, rows, goals=_goals(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.router", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--no-peers", action="store_true", help="Baton alone")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "baton-bench",
        help="where the peers are installed",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="that Baton's router runs on: another build of this version, with this one's packages",
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    return parser.parse_args()


def _measured(
    systems: Sequence[System], clients: "subprocess.Popen[str]", options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for name in options.loads:
        load = LOADS[name]
        able = [system for system in systems if load.protocol in system.targets]
        best: dict[str, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for system in able:
                row = _turn(system, load, clients, options.seconds)
                if row["us_per_request"] < best.get(system.name, row)["us_per_request"]:
                    best[system.name] = row
                best.setdefault(system.name, row)
        ours = best["baton"]["us_per_request"]
        for system in able:
            row = best[system.name]
            ratio = round(row["us_per_request"] / ours, 2)
            rows.append({"load": name, "system": system.name, "ratio": ratio, **row})
        say(f"{name}: done")
    return rows


def _turn(
    system: System, load: Load, clients: "subprocess.Popen[str]", seconds: float
) -> dict[str, Any]:
    order = replace(load, target=system.targets[load.protocol], seconds=seconds, model=MODEL)
    before = system.cpu_s()
    assert clients.stdin is not None
    clients.stdin.write(msgspec.json.encode(order).decode() + "\n")
    clients.stdin.flush()
    counts = json.loads(_line(clients))
    spent_s = system.cpu_s() - before
    if not counts["requests"]:
        raise SystemExit(f"{system.name} has answered nothing")
    return {
        "us_per_request": round(1e6 * spent_s / counts["requests"], 1),
        "us_per_token": round(1e6 * spent_s / counts["tokens"], 1),
        "requests_per_s": round(counts["requests"] / counts["wall_s"], 1),
        "tokens_per_s": round(counts["tokens"] / counts["wall_s"], 1),
        "core": round(spent_s / counts["wall_s"], 2),
        "failed": counts["failed"],
    }


def _goals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours = {row["load"]: row for row in rows if row["system"] == "baton"}
    streamed = {
        row["system"]: row["us_per_request"]
        for row in rows
        if row["load"] == "8 tokens" and row["system"].endswith(" PD")
    }
    goals: dict[str, Any] = {}
    if "plain" in ours:
        goals["plain_us"] = {"goal": 100, "is": ours["plain"]["us_per_request"]}
    if streamed and "8 tokens" in ours:
        is_us = ours["8 tokens"]["us_per_request"]
        goals["streamed_us"] = {"goal": min(streamed.values()), "is": is_us}
    for load, name in (("256 tokens", "sse"), ("gRPC, 256 tokens", "grpc")):
        if load in ours:
            per_s = round(1e6 / ours[load]["us_per_token"])
            goals[f"{name}_tokens_per_core_s"] = {"goal": 20_000, "is": per_s}
    return goals


# Processes.


@contextlib.contextmanager
def _baton(
    cores: Sequence[int],
    python: str,
    module: str,
    model: Path,
    node: str,
    name: str,
    log_level: str,
) -> Iterator[System]:
    targets = dict(zip(("grpc", "http"), free_addresses(2), strict=True))
    port, http_port = (target.rpartition(":")[2] for target in targets.values())
    served = (f"--model={model}", f"--served-model-name={MODEL}", f"--decode={node}")
    ports = (f"--port={port}", f"--http-port={http_port}")
    flags = (*served, *ports, "--policy=round_robin", log_level)
    with _program(cores, python, "-m", module, *flags) as process:
        yield System(name, process.pid, targets)


@contextlib.contextmanager
def _program(
    cores: Sequence[int], *command: str, talks: bool = False
) -> "Iterator[subprocess.Popen[str]]":
    """Run a process on these cores while inside the context.

    Args:
        talks: connect stdin and stdout. Otherwise its output is discarded.
    """
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))]
    process = subprocess.Popen(
        [*pinned, *command],
        cwd=ROOT,
        env={**os.environ, "RUST_LOG": "warn", "PYTHONPATH": sysconfig.get_path("purelib")},
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
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


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args!r} has ended")
    return line


def _until_ready(system: System) -> None:
    """Wait until the router serves a request, because routers define readiness differently."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    url = f"http://{system.targets['http']}/v1/completions"
    headers = {"content-type": "application/json"}
    deadline = time.monotonic() + READY_S
    while True:
        try:
            ask = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(ask, timeout=5.0):
                return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{system.name} does not come up: {error}") from None
            time.sleep(0.2)


def _write_model(directory: Path) -> Path:
    """Write the checkpoint files that a router reads."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": 8192, "vocab_size": 320, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


if __name__ == "__main__":
    main()

"""Whole clusters of simulated nodes: every response equals the oracle's."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.page_tables import PageTables
from simulation.device.witness import expected_tokens
from tests.support.network.data_ends import wait_for
from tests.support.processes.cluster import free_ports, free_row
from tests.support.processes.programs import Program

PAGE = 16
ANSWER_S = 120.0


class SimulatedCluster:
    """A router and its nodes. Close it.

    Attributes:
        programs: processes by name.
        nodes: addresses of the prefill nodes, then of the decode nodes.
    """

    def __init__(self, router: int, http: int, nodes: Sequence[str] = ()) -> None:
        self.nodes = nodes
        self.router = f"127.0.0.1:{router}"
        self._url = f"http://127.0.0.1:{http}"
        self.programs: dict[str, Program] = {}

    def post(self, path: str, **body: Any) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._url}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def requests(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._url}/requests", timeout=ANSWER_S) as answer:
            return json.load(answer)["requests"]

    def complete(self, prompt: str, count: int) -> str:
        answer = self.post("/v1/completions", prompt=prompt, max_tokens=count)
        text: str = answer["choices"][0]["text"]
        return text

    def close(self) -> None:
        for program in self.programs.values():
            program.close()


def expected(prompt: str, count: int) -> str:
    return bytes(expected_tokens(list(prompt.encode()), count, PageTables(PAGE))).decode()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Any]:
    """Start a cluster with `baton up`. Returns a function of its numbers of nodes."""
    clusters = []

    def start(prefill: int, decode: int, *flags: str) -> SimulatedCluster:
        row = free_row(prefill + decode)
        cluster = SimulatedCluster(*free_ports(2), [f"127.0.0.1:{port}" for port in row])
        clusters.append(cluster)
        cluster.programs["up"] = Program(
            "cli.up",
            f"--var={tmp_path}",
            f"--port={cluster.router.rpartition(':')[2]}",
            f"--http-port={cluster._url.rpartition(':')[2]}",
            f"--prefill-port={row[0]}",
            f"--decode-port={row[prefill]}",
            f"--engine.sim.pool-dir={tmp_path / 'pools'}",
            "--device=sim:h100",
            "--model=llama-3-8b",
            f"--prefill={prefill}",
            f"--decode={decode}",
            *flags,
        )
        cluster.programs["up"].line_with("Ready.")
        return cluster

    yield start
    for cluster in clusters:
        cluster.close()


def test_up_serves_simulated_nodes_in_one_process_and_ends_cleanly(up, tmp_path):
    cluster = up(1, 1)
    program = cluster.programs["up"]
    assert "all times are those of a model" in program.output
    assert expected("Once upon a time", 32) in program.output
    prompt = "a prompt of several pages. " * 200  # and of several chunks
    assert cluster.complete(prompt, 40) == expected(prompt, 40)
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.post("/v1/completions", prompt="Hi", max_tokens=2, logprobs=1)
    assert "not supported by simulated nodes" in refused.value.read().decode()
    program.send(signal.SIGINT)
    assert program.exit_code() == 0, program.output
    assert list((tmp_path / "pools").iterdir()) == []


def _baton(*arguments: str) -> None:
    command = [sys.executable, "-m", "cli.main", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.long
def test_roles_change_and_nodes_drain_and_requests_migrate_under_load(up, tmp_path):
    cluster = up(2, 3)
    access = (f"--router={cluster.router}", f"--secret-file={tmp_path / 'secret'}")
    prompts = [f"request {number} " * (3 + 11 * number) for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(cluster.complete, prompt, 3000) for prompt in prompts]
        wait_for(lambda: len(live(cluster)) == len(prompts), ANSWER_S)
        moving = [("requests", "migrate", request["id"]) for request in live(cluster)[:2]]
        with ThreadPoolExecutor(len(moving)) as commands:
            for done in [commands.submit(_baton, *each, *access) for each in moving]:
                done.result()
        _baton("nodes", "set-role", cluster.nodes[1], "decode", *access)
        _baton("nodes", "set-role", cluster.nodes[4], "prefill", *access)
        _baton("nodes", "drain", cluster.nodes[3], *access)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result(ANSWER_S) == expected(prompt, 3000)
    log = tmp_path / "log" / "fleet.log"
    wait_for(lambda: "node restarted" in log.read_text(), ANSWER_S)


def live(cluster: SimulatedCluster) -> Sequence[dict[str, Any]]:
    return [each for each in cluster.requests() if each["outcome"] == "live"]


@pytest.mark.long
def test_no_request_is_lost_when_a_node_with_its_own_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 43)
    files = tmp_path / "files"
    subprocess.run(
        [sys.executable, "-m", "simulation.node.tokenizer", "llama-3-8b", str(files)], check=True
    )
    router, http, *ports = free_ports(6)
    cluster = SimulatedCluster(router, http)
    options = ("--device=sim:h100", "--model=llama-3-8b", f"--engine.sim.pool-dir={tmp_path / 'p'}")
    roles = ("prefill", "prefill", "decode", "decode")
    try:
        for role, port in zip(roles, ports, strict=True):
            cluster.programs[f"{role}-{port}"] = Program(
                f"{role}_node", f"--port={port}", *options, forked=False
            )
        nodes = [f"--{role}=127.0.0.1:{port}" for role, port in zip(roles, ports, strict=True)]
        cluster.programs["router"] = Program(
            "router", f"--model={files}", f"--port={router}", f"--http-port={http}", *nodes
        )
        cluster.programs["router"].line_with("INFO router api.program.nodes: ready")
        prompts = [f"request {number} " * 30 for number in range(16)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(cluster.complete, prompt, 600) for prompt in prompts]
            wait_for(lambda: len(live(cluster)) == len(prompts), ANSWER_S)
            for name in (f"prefill-{ports[0]}", f"decode-{ports[2]}"):
                cluster.programs[name].send(signal.SIGKILL)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.result(ANSWER_S) == expected(prompt, 600)
    finally:
        cluster.close()

"""Status of a router with several worker processes: any of them describes the whole router."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from common import rpc
from protos.router_pb2 import GetClusterRequest
from protos.router_pb2_grpc import RouterStub
from router.metrics import DECLARED
from tests.api.rig import eventually
from tests.support.network.http_client import Response, connected, get, post
from tests.support.network.scrapes import check_declared, scraped, value
from tests.support.processes import fork_server
from tests.support.processes.cluster import free_row
from tests.support.processes.programs import Program
from tests.support.processes.stub_decode_node import StubDecodeNode, Submission

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

START_S = 180.0
MANY = 12  # connections: all of them reach one of two processes with a probability of one in 2000
LIVE_TOKENS = 8  # of a response that no one ends. A shorter one arrives at once


class Node(StubDecodeNode):
    """Records its requests, and ends the short responses at once."""

    def __init__(self) -> None:
        self.submits: list[Submission] = []
        super().__init__(on_submit=self._on_submitted)

    def _on_submitted(self, submit: Submission) -> None:
        self.submits.append(submit)
        if submit.sampling.max_tokens < LIVE_TOKENS:
            self.finish(submit.number, [66])


class Whole:
    """A router of two processes with a stub node, and its clients."""

    def __init__(self, program: Program, node: Node, metrics_port: int) -> None:
        self.program = program
        self.node = node
        self.metrics_port = metrics_port
        self.num_live = 0
        line = program.line_with(" listening ", START_S)
        self.port = _port(line, "address")
        self.http_port = _port(line, "http")
        self.directory = Path(_of(program.line_with(" keeping ", START_S), "sockets"))

    @property
    def pids(self) -> list[int]:
        return fork_server.programs_below(self.program.pid)

    async def until_ready(self) -> None:
        """Wait until every process can place requests."""
        async with asyncio.timeout(START_S):
            while True:
                state = (await self.get("/cluster")).json["router"]
                if (state["state"], state["silent_processes"]) == ("ready", 0):
                    return
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def live(self, number: int, label: str = "") -> AsyncIterator[None]:
        """Keep this number of requests active inside the context, each on its own connection."""
        headers = {"x_request_id": label} if label else {}
        body = {"prompt": "x", "max_tokens": LIVE_TOKENS, "stream": True}
        before = len(self.node.submits)
        async with AsyncExitStack() as connections:
            for _ in range(number):
                wire = await connections.enter_async_context(connected(self.http_port))
                await wire.post("/v1/completions", body, **headers)
            await eventually(lambda: len(self.node.submits) == before + number)
            self.num_live += number
            await self._until_all_know_the_live()
            yield
        self.num_live -= number
        await self._until_all_know_the_live()

    async def _until_all_know_the_live(self) -> None:
        """Wait until all processes report the live requests. A process's figure may be a moment
        old."""
        async with asyncio.timeout(START_S):
            while True:
                states = [one.json["router"] for one in await self.get_from_all("/cluster")]
                if all(state["live_requests"] == self.num_live for state in states):
                    return
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> Response:
        return await get(self.http_port, path)

    async def get_from_all(self, path: str) -> list[Response]:
        """Send enough requests on enough connections to reach every process.

        Repeats them if a process was too busy to respond in time.
        """
        async with asyncio.timeout(START_S):
            while True:
                answers = await asyncio.gather(*(self.get(path) for _ in range(MANY)))
                if not any(map(_misses_one, answers)):
                    return answers

    async def scraped(self) -> dict[str, Metric]:
        """Return the metrics of all processes. Repeats the scrape if one was too busy to respond in
        time."""
        async with asyncio.timeout(START_S):
            while True:
                scrape = await _scraped(self)
                if not value(scrape, "baton_router_processes", state="silent"):
                    return scrape

    async def first(self, path: str) -> Response:
        """Return the response of the first process that responds."""
        asked = [asyncio.create_task(self.get(path)) for _ in range(MANY)]
        done, others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for each in others:
            each.cancel()
        return done.pop().result()

    async def ended(self, number: int) -> None:
        """Complete this number of requests. Others at the same time could have the same counts."""
        for _ in range(number):
            answer = await post(self.http_port, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert answer.status == 200, answer.body


def _misses_one(answer: Response) -> bool:
    """Return whether the response reports a process that has not responded."""
    if answer.headers.get("content-type", "").startswith("text/"):
        return bool(value(_families(answer), "baton_router_processes", state="silent"))
    content = answer.json
    return answer.status == 503 or bool(content.get("router", content).get("silent_processes"))


@asynccontextmanager
async def whole_router(model: Path) -> AsyncIterator[Whole]:
    (metrics_port,) = free_row(1)
    async with Node() as node:
        program = Program(
            *("router", "--model", str(model), "--decode", node.address, "--processes", "2"),
            *("--port", "0", "--http-port", "0", "--metrics-port", str(metrics_port)),
        )
        try:
            await asyncio.to_thread(program.line_with, "all router processes started", START_S)
            whole = Whole(program, node, metrics_port)
            await whole.until_ready()
            yield whole
        finally:
            program.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(model: Path) -> AsyncIterator[Whole]:
    async with whole_router(model) as whole:
        yield whole


async def test_requests_of_every_process_are_listed_by_any_process(router):
    async with router.live(MANY, label="one-of-many"):
        expected = {submit.request_id for submit in router.node.submits[-MANY:]}
        for answer in await router.get_from_all("/requests"):
            content = answer.json
            live = [one for one in content["requests"] if one["outcome"] == "live"]
            assert {one["id"] for one in live} == expected
            arrivals = [one["arrived"] for one in live]
            assert arrivals == sorted(arrivals, reverse=True)
            assert (content["processes"], content["silent_processes"]) == (2, 0)
        for number in expected:
            answers = await asyncio.gather(*(router.get(f"/requests/{number}") for _ in range(2)))
            assert [(one.status, one.json["id"]) for one in answers] == [(200, number)] * 2
        async with router.live(1, label="one-of-many"):
            newest = router.node.submits[-1].request_id
            for answer in await router.get_from_all("/requests/one-of-many"):
                assert answer.json["id"] == newest
    for answer in await router.get_from_all("/requests/nobody"):
        assert (answer.status, answer.error["code"]) == (404, "request_not_found")


async def test_the_state_of_the_router_is_that_of_all_its_processes(router):
    async with router.live(MANY):
        answers = [answer.json["router"] for answer in await router.get_from_all("/cluster")]
        async with rpc.make_channel(f"127.0.0.1:{router.port}") as channel:
            stub: Any = RouterStub(channel)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(START_S):  # again if one was too busy to respond in time
                while (
                    said := (await stub.GetCluster(GetClusterRequest())).router
                ).silent_processes:
                    pass
    for answer in answers:
        assert (answer["state"], answer["reason"]) == ("ready", "")
        assert (answer["processes"], answer["silent_processes"]) == (2, 0)
        assert (answer["live_requests"], answer["max_requests"]) == (MANY, 2 * 1024)
    assert (said.live_requests, said.max_requests, said.processes) == (MANY, 2 * 1024, 2)


async def test_the_metrics_port_and_the_http_port_report_the_counts_of_all_processes(router):
    before = value(await router.scraped(), "baton_requests_total", outcome="stop")
    await router.ended(MANY)
    at_once = [_families(answer) for answer in await router.get_from_all("/metrics")]
    for scrape in (await router.scraped(), *at_once):
        check_declared(scrape, DECLARED)
        assert value(scrape, "baton_requests_total", outcome="stop") == before + MANY
        assert value(scrape, "baton_time_to_first_token_seconds_count") == before + MANY
        assert value(scrape, "baton_time_to_first_token_seconds_bucket", le="+Inf") >= before + MANY
        assert value(scrape, "baton_nodes", kind="decode", state="ready") == 1
        assert value(scrape, "baton_router_processes", state="answering") == 2
        assert value(scrape, "baton_router_processes", state="silent") == 0
        assert value(scrape, "baton_ready") == 1
    async with router.live(MANY):
        assert value(await router.scraped(), "baton_inflight_requests") == MANY


async def test_a_process_that_does_not_respond_is_reported_and_its_counts_remain(router):
    await router.ended(MANY)
    whole = value(await router.scraped(), "baton_requests_total", outcome="stop")
    stopped = router.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        content = (await router.first("/requests")).json
        assert (content["processes"], content["silent_processes"]) == (2, 1)
        reported = (await router.first("/cluster")).json["router"]
        assert (reported["processes"], reported["silent_processes"]) == (2, 1)
        unknown = await router.first("/requests/nobody")
        assert unknown.status == 503 and "did not respond" in unknown.error["message"]
        scrape = await _scraped(router)
        assert value(scrape, "baton_requests_total", outcome="stop") == whole
        assert value(scrape, "baton_router_processes", state="answering") == 1
        assert value(scrape, "baton_router_processes", state="silent") == 1
    finally:
        os.kill(stopped, signal.SIGCONT)


async def test_no_counter_decreases_and_no_time_restarts_when_a_process_is_replaced(router):
    await router.ended(MANY)
    whole = value(await router.scraped(), "baton_requests_total", outcome="stop")
    victim, killed_at = router.pids[0], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    counted = [whole]
    async with asyncio.timeout(START_S):
        while True:
            scrape = await _scraped(router)
            counted.append(value(scrape, "baton_requests_total", outcome="stop"))
            back = value(scrape, "baton_router_processes", state="answering") == 2
            if back and victim not in router.pids:
                break
    assert set(counted) == {whole}
    await router.until_ready()
    await router.ended(MANY)
    after = value(await router.scraped(), "baton_requests_total", outcome="stop")
    assert after == whole + MANY
    asked_at = time.monotonic()
    for answer in await router.get_from_all("/cluster"):  # all report times of one clock
        (node,) = answer.json["nodes"]
        assert min(node["seen_s"], answer.json["router"]["uptime_s"]) > asked_at - killed_at


async def test_no_other_user_can_open_the_directory_of_the_processes(router):
    assert stat.S_IMODE(router.directory.stat().st_mode) == 0o700
    assert {path.name for path in router.directory.iterdir()} == {"0.sock", "1.sock", "2.sock"}


async def test_the_directory_is_removed_with_the_router(model):
    async with whole_router(model) as router:
        directory = router.directory
        router.program.send(signal.SIGTERM)
        assert await asyncio.to_thread(router.program.exit_code) == 0
    assert not directory.exists()


async def _scraped(router: Whole) -> dict[str, Metric]:
    return dict(await asyncio.to_thread(scraped, router.metrics_port))


def _families(answer: Response) -> dict[str, Metric]:
    text = answer.body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def _of(line: str, field: str) -> str:
    return line.partition(f" {field}=")[2].split()[0]


def _port(line: str, field: str) -> int:
    return int(_of(line, field).rpartition(":")[2])

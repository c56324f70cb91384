"""Metrics and logs of a real cluster after requests of many kinds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import grpc.aio
import pytest

from node import metrics as node
from router import metrics as router
from tests.support.models.noise_model import write
from tests.support.network.scrapes import (
    Scrape,
    check_declared,
    check_only_grew,
    scraped,
    total,
    value,
)
from tests.support.processes.cluster import Answer, Cluster, free_ports, slowed, wait_until

pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_REQUESTS, NUM_TOKENS = 4, 12
PROMPT = list(range(1, 101))
# A small pool, so that requests are retracted, and small chunks, so that there are several.
FLAGS = (
    "--engine.cache.num-pages=40",
    "--engine.scheduler.chunked-prefill-tokens=64",
    "--server.log-format=json",
    "--server.log-level=debug",
)


class Observed:
    """A cluster and the ports of its metrics."""

    def __init__(self, cluster: Cluster, ports: dict[str, int], logs: Path) -> None:
        self.cluster = cluster
        self._ports = ports
        self._logs = logs

    async def scrape(self) -> dict[str, Scrape]:
        """Return the metrics of each process, after the cluster is idle and the engines have
        reported it."""
        await self.cluster.until_nothing_is_held()
        before = await self._scrape()

        async def reported() -> bool:
            now = await self._scrape()
            name = "baton_leak_checks_total"  # once a second by an idle engine
            return all(
                value(now[role], name) >= value(before[role], name) + 2
                for role in ("prefill", "decode")
            )

        await wait_until(reported, "all engines report that they are idle")
        return await self._scrape()

    async def _scrape(self) -> dict[str, Scrape]:
        return {role: await asyncio.to_thread(scraped, port) for role, port in self._ports.items()}

    def lines(self) -> dict[str, list[dict[str, object]]]:
        """Return the log records of each process."""
        return {
            file.name.split("-")[0]: [json.loads(line) for line in file.read_text().splitlines()]
            for file in self._logs.glob("*.log")
        }

    def about(self, label: str) -> dict[str, list[dict[str, object]]]:
        """Return each process's lines about one request, after the router has logged its label."""
        received = [line for line in self.lines()["router"] if line.get("label") == label]
        request_id = received[0]["request_id"] if received else ""
        return {
            role: [line for line in lines if line.get("request_id") == request_id]
            for role, lines in self.lines().items()
        }


@pytest.fixture
async def observed(tmp_path: Path) -> AsyncIterator[Observed]:
    write(tmp_path / "model")
    logs = tmp_path / "logs"
    logs.mkdir()
    prefill, decode = free_ports(2)
    async with Cluster(
        tmp_path / "model",
        logs,
        path="tcp",
        node_flags=FLAGS,
        prefill_flags=(f"--metrics-port={prefill}",),
        decode_flags=(f"--metrics-port={decode}",),
        router_flags=("--log-format=json", "--log-level=debug", "--max-concurrent-requests=20"),
        environment=slowed(0.01),  # an abandoned response has not ended
    ) as cluster:
        ports = {"router": cluster.http_port, "prefill": prefill, "decode": decode}
        yield Observed(cluster, ports, logs)


async def test_every_label_set_is_declared_and_no_event_is_counted_twice(observed):
    cluster = observed.cluster
    # the first request computes the prompt, the others find it in the cache
    for _ in range(NUM_REQUESTS):
        await cluster.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    quiet = await observed.scrape()
    _check_all_declared(quiet)
    _check_sums(quiet)

    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate([], max_tokens=1)
    async with aclosing(cluster.stream(PROMPT, max_tokens=400, ignore_eos=True)) as stream:
        async for _ in stream:
            break
    many = [
        cluster.generate([n, *PROMPT[: 20 + n]], max_tokens=150, ignore_eos=True) for n in range(8)
    ]
    await asyncio.gather(*many)
    await cluster.decode[0].flush_cache()
    busy = await observed.scrape()
    _check_all_declared(busy)
    for role in busy:
        check_only_grew(quiet[role], busy[role])
    assert value(busy["router"], "baton_requests_rejected_total", reason="invalid") == 1
    assert value(busy["router"], "baton_requests_total", outcome="cancelled") == 1
    assert value(busy["router"], "baton_inflight_requests") == 0
    assert value(busy["decode"], "baton_retractions_total") > 0
    assert value(busy["decode"], "baton_handoff_reads_in_flight") == 0
    assert value(busy["decode"], "baton_leak_checks_total") > 0


def _check_all_declared(scrapes: dict[str, Scrape]) -> None:
    check_declared(scrapes["router"], router.DECLARED)
    check_declared(scrapes["prefill"], node.DECLARED["prefill"])
    check_declared(scrapes["decode"], node.DECLARED["decode"])


def _check_sums(quiet: dict[str, Scrape]) -> None:
    """Check the sums after NUM_REQUESTS requests with one prompt, one after the other."""
    at_router, at_prefill, at_decode = (quiet[role] for role in ("router", "prefill", "decode"))
    num_tokens = NUM_REQUESTS * NUM_TOKENS
    # The router.
    assert value(at_router, "baton_requests_total", outcome="length") == NUM_REQUESTS
    assert value(at_router, "baton_accepted_prompt_tokens_total") == NUM_REQUESTS * len(PROMPT)
    assert value(at_router, "baton_generated_tokens_total") == num_tokens
    assert value(at_router, "baton_time_to_first_token_seconds_count") == NUM_REQUESTS
    assert value(at_router, "baton_inter_token_latency_seconds_count") == num_tokens - NUM_REQUESTS
    assert value(at_router, "baton_request_seconds_count") == NUM_REQUESTS
    assert value(at_router, "baton_ready") == 1
    for role in ("prefill", "decode"):
        assert value(at_router, "baton_nodes", kind=role, state="ready") == 1
    # The first token of a response comes from the prefill node, all others from the decode node.
    assert value(at_prefill, "baton_sampled_tokens_total") == NUM_REQUESTS
    assert value(at_decode, "baton_sampled_tokens_total") == num_tokens - NUM_REQUESTS
    # One request at a time: one step for each token, and with overlap perhaps an unused one at the
    # end.
    steps = value(at_decode, "baton_step_seconds_count", mode="decode")
    assert num_tokens - NUM_REQUESTS <= steps <= num_tokens
    assert value(at_decode, "baton_batch_requests_sum", mode="decode") == steps
    assert total(at_decode, "baton_step_seconds_count", mode="extend") == 0
    computed = value(at_prefill, "baton_batch_tokens_sum", mode="extend")
    prompts = value(at_prefill, "baton_prompt_tokens_total")
    assert computed == prompts - value(at_prefill, "baton_cached_tokens_total")
    # Hand-offs on both sides.
    assert value(at_decode, "baton_handoffs_opened_total") == NUM_REQUESTS
    assert value(at_decode, "baton_handoff_retries_total") == 0
    for scrape in (at_prefill, at_decode):
        assert value(scrape, "baton_handoffs_total", outcome="completed") == NUM_REQUESTS
    assert value(at_decode, "baton_handoff_seconds_count") == NUM_REQUESTS
    assert total(at_decode, "baton_handoff_prompt_tokens_total") == NUM_REQUESTS * len(PROMPT)
    assert value(at_decode, "baton_handoff_prompt_tokens_total", source="local_cache") > 0
    pages = value(at_decode, "baton_kv_pages_read_total")
    assert pages > 0
    assert total(at_decode, "baton_handoff_read_descriptors_total") == pages
    assert value(at_decode, "baton_handoff_read_descriptors_total", path="tcp") == pages
    assert value(at_decode, "baton_handoff_read_bytes_total", path="tcp") > pages
    assert value(at_decode, "baton_handoff_read_seconds_count", path="tcp") >= 1
    assert value(at_decode, "baton_links", path="tcp") == 1
    assert total(at_decode, "baton_links") == 1
    assert value(at_decode, "baton_link_changes_total", change="up") == 1
    # The engine.
    for scrape in (at_prefill, at_decode):
        assert value(scrape, "baton_engine_wait_seconds_total", on="work") > 0
        assert value(scrape, "baton_engine_wait_seconds_total", on="device") > 0
        thread = value(scrape, "baton_engine_thread_cpu_seconds_total")
        assert 0 < thread <= value(scrape, "baton_engine_cpu_seconds_total")
        assert value(scrape, "baton_node_state", state="ready") == 1
        assert total(scrape, "baton_kv_pages") == 40
        assert value(scrape, "baton_request_pages", kind="full") == 0  # none is running
        assert value(scrape, "baton_step_gap_seconds_total") > 0


async def test_every_process_logs_the_request_of_a_line(observed):
    cluster = observed.cluster
    (prefill,), (decode,) = cluster.prefill, cluster.decode

    async def until_open(number: int) -> None:
        await decode.until(
            lambda now: now.queues["prealloc"] + now.queues["transfer"] == number,
            f"{number} hand-offs are open",
        )

    def ask(name: str) -> "asyncio.Task[Answer]":
        answer = cluster.generate(PROMPT, request_id=name, max_tokens=4, ignore_eos=True)
        return asyncio.create_task(answer)

    cluster.freeze(prefill)
    left = ask("the first")
    await until_open(1)
    left.cancel()
    await until_open(0)
    cluster.thaw(prefill)  # not earlier, or the hand-off could complete
    await wait_until(
        lambda: observed.about("the first")["prefill"],
        "the prefill node tells whose hand-off is dropped",
    )
    cluster.freeze(prefill)
    kept = ask("the second")
    await until_open(1)
    await cluster.kill(prefill)
    await kept
    about = observed.about("the second")
    assert about["router"] and about["decode"]
    lines = [line for of_program in observed.lines().values() for line in of_program]
    for line in lines:
        assert {"time", "level", "program", "logger", "message"} <= line.keys()
    programs = {"router", "prefill", "prefill engine", "decode", "decode engine"}
    assert {line["program"] for line in lines} == programs

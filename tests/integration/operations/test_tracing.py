"""One request through real processes: its timeline on the router, its spans at a collector."""

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.support.network.http_client import get, post
from tests.support.network.otlp_collector import Collector, Span, collecting
from tests.support.processes.cluster import Cluster, wait_until

pytestmark = pytest.mark.slow

TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"
PROMPT = list(range(100))
CHUNK = 32
FIELDS = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SLACK_NS = 2_000_000  # two readings of the same clock

ROUTER_PHASES = {"tokenize", "place", "stream"}
DECODE_PHASES = {
    "dispatch",
    "prealloc_queue",
    "prefill_wait",
    "transfer",
    "release",
    "join",
    "running",
}
PREFILL_PHASES = {"bootstrap_queue", "waiting_queue", "prefill"}


def _cluster(model: Path, logs: Path, router: str, nodes: str, *flags: str) -> Cluster:
    return Cluster(
        model,
        logs,
        router_flags=(f"--server.otlp-endpoint={router}", *flags),
        node_flags=(
            f"--server.otlp-endpoint={nodes}",
            f"--engine.scheduler.chunked-prefill-tokens={CHUNK}",
        ),
    )


async def _generate(cluster: Cluster, request_id: str, *, traceparent: str = "") -> None:
    """Generate over gRPC."""
    request = GenerateRequest(
        request_id=request_id,
        token_ids=TokenIds(ids=PROMPT),
        sampling=Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
    )
    metadata = (("traceparent", traceparent),) if traceparent else ()
    async for _ in cluster.ask(request, metadata=metadata):
        pass


def _of(collector: Collector, label: str) -> dict[str, Span]:
    """Return the span of each service's part, by service."""
    ids = {
        span.attributes["baton.request_id"]
        for span in collector.spans
        if span.attributes.get("baton.label") == label
    }
    assert len(ids) <= 1
    return _with_ids(collector, ids)


def _with_ids(collector: Collector, ids: set[str]) -> dict[str, Span]:
    mine = [s for s in collector.spans if s.attributes.get("baton.request_id") in ids]
    assert len(mine) == len({span.service for span in mine})
    return {span.service.removeprefix("baton-"): span for span in mine}


async def _until_exported(collector: Collector, num_services: int) -> None:
    """Wait for this number of parts of requests. A process that ends waits only briefly for a
    collector to accept them."""

    await wait_until(
        lambda: (
            sum("baton.request_id" in span.attributes for span in collector.spans) >= num_services
        ),
        "the collector has all spans",
    )


def _inside(collector: Collector, span: Span) -> dict[str, Span]:
    """Return its phases."""
    parts = ("baton.decode", "baton.prefill")
    return {
        each.name: each
        for each in collector.spans
        if each.parent_id == span.span_id and each.name not in parts
    }


async def test_a_request_is_one_trace_of_three_services_with_nested_spans(
    model: Path, tmp_path: Path
) -> None:
    async with collecting() as collector:
        cluster = _cluster(model, tmp_path, collector.endpoint, collector.endpoint)
        async with cluster:
            answer = await post(
                cluster.http_port,
                "/v1/completions",
                FIELDS,
                x_request_id="by http",
                traceparent=TRACEPARENT,
            )
            assert answer.status == 200
            await _generate(cluster, "by grpc", traceparent=TRACEPARENT)
            await _generate(cluster, "of its own")
            await _generate(cluster, "not sampled", traceparent=TRACEPARENT[:-2] + "00")
            await _generate(cluster, "nonsense", traceparent="00-zz-00-01")
            timeline = (await get(cluster.http_port, "/requests/by%20http")).json
            listed = (await get(cluster.http_port, "/requests")).json["requests"]
            await _until_exported(collector, 4 * 3)  # not of the one that is not sampled
        for request_id in ("by http", "by grpc"):
            _check_trace(collector, request_id, TRACE, CLIENT_SPAN)
        for request_id in ("of its own", "nonsense"):
            own = _of(collector, request_id)["router"].trace_id
            assert own != TRACE and int(own, 16)
            _check_trace(collector, request_id, own, "")
        assert not _of(collector, "not sampled")
    labels = ["nonsense", "not sampled", "of its own", "by grpc", "by http"]
    assert [each["label"] for each in listed] == labels
    assert [each["trace_id"] for each in listed][1] == TRACE  # known, although not sampled
    _check_timeline(timeline, collector)
    _check_log(tmp_path)


def _check_log(logs: Path) -> None:
    (log,) = logs.glob("router-*.log")
    ended = [line for line in log.read_text().splitlines() if "request ended" in line]
    assert len(ended) == 5
    for line, label in zip(ended, ('"by http"', '"by grpc"'), strict=False):
        assert f"label={label}" in line and f"trace_id={TRACE}" in line


def _check_trace(collector: Collector, request_id: str, trace_id: str, above: str) -> None:
    spans = _of(collector, request_id)
    assert set(spans) == {"router", "decode", "prefill"}
    router, decode, prefill = spans["router"], spans["decode"], spans["prefill"]
    assert {span.trace_id for span in spans.values()} == {trace_id}
    assert router.parent_id == above
    assert (decode.parent_id, prefill.parent_id) == (router.span_id, decode.span_id)
    assert router.encloses(decode, SLACK_NS)
    # A prefill node ends its part when it learns that the pages were read. No request waits for
    # that.
    assert decode.start - SLACK_NS <= prefill.start
    computed = _inside(collector, prefill)
    assert all(decode.encloses(computed[phase], SLACK_NS) for phase in PREFILL_PHASES)
    assert not any(span.failed for span in spans.values())
    for span, phases in (
        (router, ROUTER_PHASES),
        (decode, DECODE_PHASES),
        (prefill, {*PREFILL_PHASES, "inflight_queue"}),
    ):
        inside = _inside(collector, span)
        assert set(inside) == phases
        assert all(span.encloses(each, SLACK_NS) for each in inside.values())
    reading = _inside(collector, decode)["transfer"].attributes
    assert reading["baton.outcome"] == "completed" and reading["baton.bytes"] > 0


def _check_timeline(timeline: dict[str, Any], collector: Collector) -> None:
    assert timeline["outcome"] == "length" and timeline["trace_id"] == TRACE
    assert (timeline["prompt_tokens"], timeline["completion_tokens"]) == (100, 8)
    (attempt,) = timeline["attempts"]
    assert (attempt["outcome"], attempt["pages"], attempt["chunks"]) == ("completed", 7, 4)
    assert (attempt["node"], attempt["prefill"]) == (timeline["decode"], timeline["prefill"])
    by_where: dict[str, set[str]] = {}
    for phase in timeline["phases"]:
        assert 0.0 <= phase["start_s"] <= phase["end_s"] <= timeline["seconds"]
        by_where.setdefault(phase["where"], set()).add(phase["phase"])
    assert by_where == {"router": ROUTER_PHASES, "decode": DECODE_PHASES, "prefill": PREFILL_PHASES}
    assert sum(part["seconds"] for part in timeline["ttft"]) == pytest.approx(timeline["ttft_s"])
    marks = {mark["where"]: mark["at_s"] for mark in timeline["marks"]}
    assert 0.0 < marks["decode"] <= marks["router"] == timeline["ttft_s"]
    # The same phases as in the trace, over another path.
    inside = _inside(collector, _of(collector, "by http")["decode"])
    for phase in timeline["phases"]:
        if phase["where"] == "decode":
            span = inside[phase["phase"]]
            seconds = phase["end_s"] - phase["start_s"]
            assert (span.end - span.start) / 1e9 == pytest.approx(seconds, abs=1e-4)


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """Return an endpoint that accepts connections and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest_asyncio.fixture
async def closed_endpoint() -> AsyncIterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.long  # in one process: tests/common/tracing/test_otlp.py
async def test_a_failing_collector_affects_no_process(
    model: Path, tmp_path: Path, silent_endpoint: str, closed_endpoint: str
) -> None:
    """The exit of the cluster checks that every process ends in time, and with 0."""
    async with _cluster(model, tmp_path, silent_endpoint, closed_endpoint) as cluster:
        for number in range(20):
            await _generate(cluster, f"request {number}")
        response = await get(cluster.http_port, "/requests")
        assert [each["outcome"] for each in response.json["requests"]] == ["length"] * 20


@pytest.mark.long
async def test_without_an_endpoint_the_trace_context_is_propagated_and_nothing_is_exported(
    model: Path, tmp_path: Path
) -> None:
    async with collecting() as collector:
        # The router exports no span: the parent of the nodes' spans is the client's.
        flags = (f"--server.otlp-endpoint={collector.endpoint}",)
        async with Cluster(model, tmp_path, decode_flags=flags) as cluster:
            await _generate(cluster, "traced", traceparent=TRACEPARENT)
            await _generate(cluster, "not traced")
            answer = await get(cluster.http_port, "/requests/traced")
            assert answer.json["trace_id"] == TRACE
            unknown = await get(cluster.http_port, "/requests/nobody")
            assert unknown.status == 404 and "nobody" in unknown.error["message"]
            await _until_exported(collector, 1)
        spans = _with_ids(collector, {answer.json["id"]})
        assert set(spans) == {"decode"} and spans["decode"].parent_id == CLIENT_SPAN
        assert not _of(collector, "not traced")

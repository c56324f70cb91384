"""Request timelines of the router, including those that nodes report."""

import asyncio
from typing import Any

import pytest
from grpc import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from api.requests.validation import MAX_LABEL_CHARACTERS
from common.requests.timeline import TtftPhase
from protos import decode_pb2 as pb
from protos.router_pb2 import ExplainRequest, GenerateRequest
from protos.sampling_pb2 import Sampling
from router.record import MAX_BYTES, NUM_KEPT
from tests.api.models import byte_level_tokenizer
from tests.api.rig import WAIT_S, collect, fails, failure, router_for, served
from tests.support.network.http_client import get
from tests.support.processes.stub_decode_node import StubDecodeNode

PREFILL = "10.0.0.5:50100"
HELD = pb.Timeline(
    phase=[1, 2, 3, 4, 5, 6, 11, 12, 13, 9],
    attempt=[0, 1, 1, 1, 1, 1, 1, 1, 1, 0],
    start_s=[0.0, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-6, 2e-6, 2.5e-6, 6e-6],
    end_s=[1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 2e-6, 2.5e-6, 3e-6, 9e-6],
    attempts=[
        pb.Attempt(
            prefill_address=PREFILL, path="cma", outcome="completed", pages=7, bytes=7168, chunks=2
        )
    ],
    first_token_s=3e-6,
)


def ends(number: int, timeline: pb.Timeline | None = None, tokens: tuple[int, ...] = (20,)) -> Any:
    step = pb.Step(
        request=[number] * len(tokens),
        token=tokens,
        ended=[number],
        reason=[pb.FINISH_REASON_LENGTH],
        begun=[number],
        cached_tokens=[3],
        error=[""],
        error_code=[0],
        timeline=[] if timeline is None else [timeline],
    )
    return pb.FromNode(step=step)


async def requests(port: int) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await get(port, "/requests")).json["requests"]
    return listed


async def counted(port: int) -> dict[str, tuple[float, float]]:
    """Return the number of observations and their sum, by phase of the time to first token."""
    text = (await get(port, "/metrics", accept="text/plain")).body.decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "baton_ttft_phase_seconds":
            for sample in family.samples:
                kind = sample.name.rpartition("_")[2]
                found.setdefault(sample.labels["phase"], {})[kind] = sample.value
    return {phase: (of["count"], of["sum"]) for phase, of in found.items()}


async def test_a_request_is_listed_while_active_and_with_its_timeline_afterwards(model):
    async with served(model) as (client, node, r):
        call = client.generate("hello", request_id="a b", sampling=Sampling(max_tokens=4))
        submit = await node.submitted()
        number = submit.number
        (live,) = await requests(r.http_port)
        assert (live["id"], live["label"]) == (submit.request_id, "a b")
        assert (live["outcome"], live["ttft_s"]) == ("live", None)
        assert live["decode"] == node.address and live["prefill"] is None
        node.say({number: byte_level_tokenizer().encode("a").ids[:1]})
        async with asyncio.timeout(WAIT_S):
            while (live := (await requests(r.http_port))[0])["ttft_s"] is None:
                pass
        # Seen failing: a first token after some time, and 0 tokens.
        assert (live["outcome"], live["completion_tokens"]) == ("live", 1)
        assert live["last_token_s"] == live["ttft_s"]
        node.send(ends(number, HELD))
        await collect(call)
        (ended,) = await requests(r.http_port)
        assert (ended["outcome"], ended["completion_tokens"]) == ("length", 2)
        assert ended["ttft_s"] < ended["last_token_s"] <= ended["seconds"]
        assert (ended["prefill"], ended["path"]) == (PREFILL, "cma")
        assert ended["cached_tokens"] == 3 and ended["trace_id"] is None
        whole = (await get(r.http_port, "/requests/a%20b")).json
        assert {name: whole[name] for name in ended} == ended
        (attempt,) = whole["attempts"]
        assert attempt == {
            "number": 1,
            "node": node.address,
            "prefill": PREFILL,
            "path": "cma",
            "outcome": "completed",
            "reason": "",
            "pages": 7,
            "bytes": 7168,
            "chunks": 2,
        }
        nodes = {phase["where"]: phase["node"] for phase in whole["phases"]}
        assert nodes == {"router": "", "decode": node.address, "prefill": PREFILL}
        starts = [phase["start_s"] for phase in whole["phases"]]
        assert starts == sorted(starts) and starts[0] == 0.0
        assert sum(part["seconds"] for part in whole["ttft"]) == pytest.approx(whole["ttft_s"])
        assert {name: count for name, (count, _) in (await counted(r.http_port)).items()} == {
            phase.label: 1.0 for phase in TtftPhase
        }
        total = sum(seconds for _, seconds in (await counted(r.http_port)).values())
        assert total == pytest.approx(whole["ttft_s"])


async def test_a_timeline_that_arrives_after_a_stop_string_ended_the_request_is_accepted(model):
    async with served(model) as (client, node, r):
        call = client.generate("x", request_id="s", sampling=Sampling(stop=["stop"]))
        number = (await node.submitted()).number
        node.say({number: byte_level_tokenizer().encode("stop").ids})
        _, _, last = await collect(call)
        assert last.finish_reason == "stop"
        assert await node.cancelled() == number
        assert (await requests(r.http_port))[0]["prefill"] is None
        assert (await counted(r.http_port))["network"][0] == 0.0
        node.send(ends(number, HELD, ()))
        async with asyncio.timeout(WAIT_S):
            while not (await counted(r.http_port))["network"][0]:
                pass
        assert (await requests(r.http_port))[0]["prefill"] == PREFILL


@pytest.mark.parametrize(
    "nonsense",
    [
        pb.Timeline(
            phase=[9] * 4, attempt=[0] * 4, start_s=[-1, 5, 0, 9e9], end_s=[1, 2, 9e9, 9e9]
        ),
        pb.Timeline(attempts=[pb.Attempt(reason="r" * 10_000_000)]),
    ],
    ids=["moments", "ten megabytes"],
)
async def test_an_impossible_timeline_is_cut_to_the_possible_part(model, nonsense):
    async with served(model) as (client, node, r):
        call = client.generate("x", request_id="n", sampling=Sampling(max_tokens=1))
        node.send(ends((await node.submitted()).number, nonsense))
        await collect(call)
        whole = (await get(r.http_port, "/requests/n")).json
        for phase in whole["phases"]:
            assert 0.0 <= phase["start_s"] <= phase["end_s"] <= whole["seconds"]
        assert len(whole["attempts"]) <= (16 if nonsense.ByteSize() <= MAX_BYTES else 0)
        assert all(len(one["reason"]) <= 300 for one in whole["attempts"])
        parts = sum(part["seconds"] for part in whole["ttft"])
        assert not whole["ttft"] or parts == pytest.approx(whole["ttft_s"])


async def test_another_number_of_timelines_than_ends_is_a_protocol_violation(model):
    async with served(model) as (client, node, _):
        call = client.generate("x", sampling=Sampling(max_tokens=1))
        message = ends((await node.submitted()).number, HELD)
        message.step.timeline.append(HELD)
        node.send(message)
        await node.submitted()  # again, on a new stream
        call.cancel()


async def test_the_timeline_of_a_replay_has_the_node_that_failed(client, router, d0, d1):
    call = client.generate("x", request_id="r", sampling=Sampling(max_tokens=1))
    await d0.submitted()
    await d0.die()
    d1.send(ends((await d1.submitted()).number, HELD))
    await collect(call)
    whole = (await get(router.http_port, "/requests/r")).json
    assert (whole["replays"], whole["decode"]) == (1, d1.address)
    names = [each["phase"] for each in whole["phases"] if each["where"] == "router"]
    assert names == ["tokenize", "place", "lost_node", "place", "stream"]
    assert {each["node"] for each in whole["phases"] if each["where"] == "decode"} == {d1.address}
    parts = {part["phase"]: part["seconds"] for part in whole["ttft"]}
    (lost,) = (each for each in whole["phases"] if each["phase"] == "lost_node")
    assert parts["place"] >= lost["end_s"] - lost["start_s"]


async def test_without_a_timeline_of_the_node_the_routers_own_phases_remain(model):
    async with served(model) as (client, node, r):
        call = client.generate("x", request_id="q", sampling=Sampling(max_tokens=1))
        node.send(ends((await node.submitted()).number))
        await collect(call)
        whole = (await get(r.http_port, "/requests/q")).json
        assert {each["where"] for each in whole["phases"]} == {"router"}
        assert not whole["ttft"] and not whole["attempts"]
        assert (await counted(r.http_port))["network"][0] == 0.0


async def test_the_last_requests_are_kept_newest_first_without_rejected_ones(model):
    def answer(submit: pb.Submit) -> None:
        node.send(ends(submit.number, HELD))

    async with served(model, StubDecodeNode(on_submit=answer)) as (client, node, r):
        for number in range(NUM_KEPT + 3):
            sampling = Sampling(max_tokens=1)
            await collect(client.generate("x", request_id=str(number), sampling=sampling))
        await failure(client.generate("x", request_id="refused", sampling=Sampling(top_k=0)))
        listed = [each["label"] for each in await requests(r.http_port)]
        assert listed == [str(number) for number in range(NUM_KEPT + 2, 2, -1)]
        for name in ("2", "refused"):
            assert (await get(r.http_port, f"/requests/{name}")).status == 404


async def test_an_impossible_request_id_is_rejected_before_any_process_is_asked(model):
    """Ids of that length would break the protocol between the router's processes."""
    async with router_for(model, decode=["127.0.0.1:1"]) as (client, r):
        for name in ("", "x" * (MAX_LABEL_CHARACTERS + 1)):
            await fails(client.stub.Explain(ExplainRequest(name=name)), StatusCode.INVALID_ARGUMENT)
            for path in (f"/requests/{name}", f"/requests/{name}/events"):
                assert (await get(r.http_port, path)).status == 404


async def test_a_valid_trace_context_is_propagated_unchanged_and_an_invalid_one_not(model):
    async with served(model) as (client, node, _):
        given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        for header, passed_on in (
            (given, given),
            (given.upper(), ""),
            ("01-" + given[3:] + "-more", given),
            (given + "-more", ""),
            ("", ""),
        ):
            metadata = (("traceparent", header),) if header else ()
            request = {"text": "x", "sampling": Sampling(max_tokens=1)}
            call = client.stub.Generate(GenerateRequest(**request), metadata=metadata)
            submit = await node.submitted()
            assert submit.traceparent == passed_on
            node.send(ends(submit.number))
            await collect(call)

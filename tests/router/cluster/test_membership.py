"""Nodes that join and leave, according to a file, while the router runs."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from api.program.assembly import RunningRouter
from protos.router_pb2 import GetClusterRequest
from protos.sampling_pb2 import Sampling
from router.cluster import membership, sources
from router.cluster.decode_client import DecodeClient
from tests.api.rig import Client, collect, eventually, failure, router_for, usable
from tests.support.processes.stub_decode_node import Metronome, StubDecodeNode, StubNode, links_to


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    times = sources.RefreshTimes(dns_s=0.02, file_s=0.02, settled_s=0.005)
    monkeypatch.setattr(sources, "RefreshTimes", lambda: times)


class Roster:
    """The file that lists the nodes."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "nodes.yaml"
        self._named: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._write()

    @property
    def entry(self) -> str:
        return f"file:{self._file}"

    def join(self, node: StubNode) -> None:
        self._named[node.description.role].append(node.address)
        self._write()

    def leave(self, node: StubNode) -> None:
        self._named[node.description.role].remove(node.address)
        self._write()

    def _write(self) -> None:
        self._file.write_text("".join(f"{r}: [{', '.join(a)}]\n" for r, a in self._named.items()))


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    return Roster(tmp_path)


@asynccontextmanager
async def router_of(
    model: Path, roster: Roster, *nodes: StubNode
) -> AsyncIterator[tuple[Client, RunningRouter]]:
    """Yield a router, ready with these nodes if there are any."""
    for node in nodes:
        roster.join(node)
    entries = (roster.entry,)
    async with router_for(model, decode=entries, prefill=entries, policy="round_robin") as parts:
        if nodes:
            await parts[0].wait_until_serving()
        yield parts


async def until_only(router: RunningRouter, *nodes: StubNode) -> None:
    """Wait until requests are placed on exactly these nodes."""
    addresses = [node.address for node in nodes]
    await eventually(lambda: usable(router) == addresses)


def peers(node: StubDecodeNode) -> list[str]:
    """Return the prefill addresses that the node received last."""
    reported = [message.peers for message in node.received if message.HasField("peers")]
    return list(reported[-1].prefill_addresses) if reported else []


async def test_a_router_without_nodes_becomes_ready_with_the_first_pair(model, roster):
    async with StubNode() as prefill, StubDecodeNode(serves_alone=False) as decode:
        async with router_of(model, roster) as (client, _):
            await client.wait_until_serving(False)
            assert (await failure(client.generate("x"))).code() is StatusCode.UNAVAILABLE
            roster.join(decode)
            await eventually(lambda: decode.num_described)
            roster.join(prefill)
            await eventually(lambda: peers(decode) == [prefill.address])
            decode.change_status(links=links_to([prefill.address]))
            await client.wait_until_serving()
            await _answered(client, decode)
            roster.leave(prefill)
            await client.wait_until_serving(False)


async def _answered(client: Client, node: StubDecodeNode) -> None:
    """Check that the node gets the next request, and answer it."""
    call = client.generate("x")
    await node.complete([20])
    assert (await collect(call))[1] == [20]


async def test_a_node_that_joins_gets_requests_and_is_listed(model, roster):
    async with StubDecodeNode() as first, StubDecodeNode() as second:
        async with router_of(model, roster, first) as (client, running):
            roster.join(second)
            await eventually(lambda: len(running.cluster.usable()) == 2)
            calls = [client.generate("x") for _ in range(2)]
            for node in (first, second):
                await node.complete()
            for call in calls:
                await collect(call)
            nodes = (await client.stub.GetCluster(GetClusterRequest())).nodes
            assert [node.address for node in nodes] == [first.address, second.address]


async def test_a_node_that_leaves_finishes_its_requests_and_gets_no_others(model, roster):
    async with StubDecodeNode() as leaver, StubDecodeNode() as other:
        async with router_of(model, roster, leaver) as (client, running):
            call = client.generate("x")
            number = (await leaver.submitted()).number
            roster.join(other)
            roster.leave(leaver)
            await until_only(running, other)
            for _ in range(3):
                await _answered(client, other)
            leaver.finish(number, [20, 21])
            assert (await collect(call))[1] == [20, 21]
            assert sum(len(message.submits) for message in leaver.received) == 1
            await eventually(lambda: not leaver.streams)  # the router has removed it
            nodes = (await client.stub.GetCluster(GetClusterRequest())).nodes
            assert [node.address for node in nodes] == [other.address]


async def test_requests_of_a_node_that_leaves_and_fails_continue_on_another(model, roster):
    async with StubDecodeNode() as leaver, StubDecodeNode() as other:
        async with router_of(model, roster, leaver) as (client, running):
            call = client.generate("x")
            number = (await leaver.submitted()).number
            leaver.say({number: [20]})
            await call.read()
            roster.join(other)
            roster.leave(leaver)
            await until_only(running, other)
            await leaver.die()
            again = await other.complete([21])
            assert (again.num_generated, again.token_ids[-1]) == (1, 20)
            assert (await collect(call))[1] == [21]


async def test_a_node_that_returns_while_its_requests_finish_is_used_and_they_finish(model, roster):
    async with StubDecodeNode() as node:
        async with router_of(model, roster, node) as (client, running):
            call = client.generate("x")
            number = (await node.submitted()).number
            roster.leave(node)
            await client.wait_until_serving(False)
            roster.join(node)
            await client.wait_until_serving()
            assert len(node.streams) == 2
            # Numbers belong to a stream: only the old one knows the first request by this number.
            new = client.generate("x")
            await node.submitted()
            new_stream = node.streams[1]
            node.answering.clear()  # a node forgotten now would not be learned again
            node.finish(number, [20])
            assert (await collect(call))[1] == [20]
            assert (await collect(new))[1] == [20]
            await eventually(lambda: node.streams == [new_stream])
            assert running.cluster.ready
            node.answering.set()


async def test_decode_nodes_are_notified_of_new_prefill_nodes_at_once_and_of_removed_ones_later(
    model, roster, monkeypatch
):
    """Later, because prompts that the removed node still computes are handed off first."""
    monkeypatch.setattr(membership, "HANDOFFS_S", 3600.0)
    async with StubNode() as p0, StubNode() as p1, StubDecodeNode(serves_alone=False) as decode:
        roster.join(p0)
        roster.join(decode)
        async with router_of(model, roster) as (client, _):
            await eventually(lambda: peers(decode) == [p0.address])
            decode.change_status(links=links_to([p0.address, p1.address]))
            roster.join(p1)
            await eventually(lambda: peers(decode) == [p0.address, p1.address])
            await client.wait_until_serving()

            async def candidates() -> list[str]:
                call = client.generate("x")
                submit = await decode.complete()
                await collect(call)
                return sorted(submit.prefill_addresses)

            both = sorted([p0.address, p1.address])
            while await candidates() != both:  # until the status of the second has been requested
                pass
            roster.leave(p0)
            while await candidates() != [p1.address]:
                pass
            assert peers(decode) == [p0.address, p1.address]
            monkeypatch.setattr(membership, "HANDOFFS_S", 0.0)
            roster.leave(p1)
            await eventually(lambda: peers(decode) == [p0.address])


async def test_a_node_that_leaves_during_a_status_call_does_not_keep_others_from_joining(
    model, roster
):
    async with StubDecodeNode() as silent, StubDecodeNode() as first, StubDecodeNode() as joiner:
        silent.answering.clear()
        async with router_of(model, roster, first) as (_, running):
            roster.join(silent)
            await eventually(lambda: silent.num_asked)
            roster.leave(silent)
            await eventually(lambda: not silent.streams)
            roster.join(joiner)
            await eventually(lambda: len(running.cluster.usable()) == 2)
        silent.answering.set()


async def test_a_node_has_the_role_that_it_reports_wherever_it_was_found(model):
    async with StubDecodeNode() as node, StubDecodeNode() as other:
        other.description.role = "prefill"
        async with router_for(model, decode=[node.address, other.address]) as (client, running):
            await client.wait_until_serving()
            await eventually(lambda: peers(node) == [other.address])
            assert usable(running) == [node.address]
            # It may change its role. The router then forgets the work of the old role.
            other.description.role = "decode"
            await eventually(lambda: usable(running) == [node.address, other.address])
            await eventually(lambda: peers(node) == [])


async def test_nodes_join_and_leave_under_load_and_no_request_fails(model, roster):
    """Each node answers with its own token, with a step every 5 ms. Six clients send requests
    continuously while nodes join and leave. Some of the leaving nodes fail before they are
    empty."""
    length = 10
    metronomes = [Metronome(20 + i, length, 0.005) for i in range(6)]
    running: dict[StubDecodeNode, asyncio.Task[None]] = {}
    answers: list[list[int]] = []
    done = asyncio.Event()

    async def ask_again_and_again(client: Client) -> None:
        while not done.is_set():
            call = client.generate("x", sampling=Sampling(max_tokens=length))
            answers.append((await collect(call))[1])

    async def start(metronome: Metronome) -> None:
        await metronome.node.__aenter__()
        running[metronome.node] = asyncio.create_task(metronome.run())
        roster.join(metronome.node)

    async def answered(count: int) -> None:
        goal = len(answers) + count
        await eventually(lambda: len(answers) >= goal)

    try:
        await start(metronomes[0])
        async with router_of(model, roster) as (client, router_):
            await client.wait_until_serving()
            clients = [asyncio.create_task(ask_again_and_again(client)) for _ in range(6)]
            usable = router_.cluster.usable
            for old, new in itertools.pairwise(metronomes):
                await start(new)
                address = new.node.address
                await eventually(lambda address=address: address in [c.address for c in usable()])
                await answered(10)
                roster.leave(old.node)
                if old is metronomes[1]:
                    await old.node.die()  # with requests on it, and before the router has noticed
                else:
                    await eventually(lambda node=old.node: not node.streams)
                await answered(10)
            done.set()
            await asyncio.gather(*clients)
    finally:
        for node, task in running.items():
            task.cancel()
            await node.die()
    assert {len(answer) for answer in answers} == {length}
    mixed = [answer for answer in answers if len(set(answer)) > 1]
    assert all(sorted(answer) == answer for answer in mixed)  # from an older node to a newer one
    assert {token for answer in answers for token in answer} == set(range(20, 26))


class _FailsWhenCancelled:
    """A channel whose calls fail in the moment of a cancel, as grpcio's can."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda **_: self

    async def write(self, message: Any) -> None:
        self.called.set()

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        try:
            yield await asyncio.Event().wait()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(StatusCode.UNAVAILABLE, nothing, nothing) from None


async def test_a_call_that_fails_during_a_cancel_does_not_swallow_the_cancel():
    """Seen failing without `raise_if_cancelled`."""
    channel = _FailsWhenCancelled()
    client = DecodeClient("a:1", channel, peers=(), on_move=lambda _: None)  # type: ignore[arg-type]
    running = asyncio.create_task(client.run())
    await channel.called.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=60.0)
    assert done and running.cancelled()

"""A slow client gets fewer, larger messages. The waiting data is limited by the request."""

import asyncio

from api.auth.client import by_address
from api.grpc.parsing import from_request
from api.requests.answer import FinalChunk, OutputChunk
from protos.decode_pb2 import FINISH_REASON_LENGTH
from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from router.token_buffer import ModelVersion, NodeOutput, StreamEnd, TokenBuffer
from tests.api.rig import eventually, served


async def test_tokens_that_arrive_during_a_write_are_sent_in_the_next_one(model):
    pieces: list[OutputChunk | FinalChunk] = []
    writing, may_write = asyncio.Event(), asyncio.Event()

    async def write(piece: OutputChunk | FinalChunk) -> None:
        pieces.append(piece)
        writing.set()
        await may_write.wait()

    async with served(model) as (_, node, router):
        (pool,) = router.pools.values()
        request = GenerateRequest(token_ids=TokenIds(ids=[5]), sampling=Sampling(max_tokens=40))
        client = by_address("10.0.0.1")
        generating = asyncio.create_task(
            pool.idempotency.dispatcher.generate(from_request(request), client, write)
        )
        submit = await node.submitted()
        node.say({submit.number: [20]})
        await writing.wait()
        for token in range(21, 60):
            node.say({submit.number: [token]})
        node.finish(submit.number, reason=FINISH_REASON_LENGTH)
        node.change_status(pages_total=9)  # behind all of these, on one stream
        await eventually(lambda: router.cluster.usable()[0].pages_total == 9)
        may_write.set()
        await generating
    assert [list(piece.token_ids) for piece in pieces] == [[20], list(range(21, 60))]


async def test_waiting_tokens_are_taken_with_the_weight_version_of_their_computation():
    old, new = ModelVersion(fingerprint="old"), ModelVersion(fingerprint="new")
    buffer = TokenBuffer(max_tokens=9, version=ModelVersion(fingerprint="unused"))
    taken: list[tuple[list[int], str]] = []

    def take(output: NodeOutput) -> StreamEnd | None:
        taken.append((list(output.token_ids), output.version.fingerprint))
        return output.end

    buffer.renew(old)
    for token in (1, 2):
        buffer.append(token)
    for version in (new, old, new):
        buffer.renew(version)
    buffer.append(3)
    buffer.renew(old)
    buffer.end(StreamEnd("length"))
    await buffer.consume(take)
    assert taken == [([1, 2], "old"), ([3], "new"), ([], "old")]


async def test_a_writer_sleeps_while_tokens_produce_no_output():
    buffer = TokenBuffer(max_tokens=3)
    taken: list[list[int]] = []

    def take(output: NodeOutput) -> StreamEnd | None:
        taken.append(list(output.token_ids))
        return output.end

    writer = asyncio.create_task(buffer.consume(take))
    for token in (1, 2):
        await asyncio.sleep(0)
        buffer.append(token)
        buffer.wake()
    assert taken == [[1], [2]]
    buffer.append(3)
    buffer.end(StreamEnd("length"))
    buffer.wake()
    assert taken == [[1], [2], [3]]
    assert await writer == StreamEnd("length")

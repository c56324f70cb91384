"""A router sends a decode node everything since the last message in one message, within limits."""

import asyncio

import pytest

from common.rpc import MAX_MESSAGE_BYTES
from protos.decode_pb2 import Submit, ToNode
from protos.sampling_pb2 import Sampling
from router.token_buffer import OutgoingBatch

LARGEST_ID = 2**31 - 1


def submit(number: int, num_tokens: int = 1) -> Submit:
    return Submit(number=number, request={"token_ids": bytes(4 * num_tokens)})


def numbers(message: ToNode) -> list[int]:
    return [submit.number for submit in message.submits]


async def test_everything_queued_during_a_write_is_one_message():
    unsent = OutgoingBatch()
    unsent.submit(submit(1))
    assert numbers(await unsent.message()) == [1]
    unsent.submit(submit(2))
    unsent.cancel(1)
    unsent.set_peers(["a:1"])
    unsent.submit(submit(3))
    unsent.set_peers(["b:2"])
    message = await unsent.message()
    assert numbers(message) == [2, 3]
    assert list(message.cancels) == [1]
    assert list(message.peers.prefill_addresses) == ["b:2"]


async def test_a_message_waits_until_there_is_content():
    unsent = OutgoingBatch()
    waiting = asyncio.create_task(unsent.message())
    await asyncio.sleep(0)
    assert not waiting.done()
    unsent.set_peers([])
    message = await waiting
    assert message.HasField("peers") and not message.submits


async def test_a_request_cancelled_before_it_was_sent_is_never_sent():
    unsent = OutgoingBatch()
    unsent.submit(submit(1))
    unsent.submit(submit(2))
    unsent.cancel(1)
    message = await unsent.message()
    assert (numbers(message), list(message.cancels)) == ([2], [])


@pytest.mark.parametrize(
    "sizes, sent",
    [
        ([1 << 20, 1], [[1], [2]]),
        ([2 << 20, 1, 1], [[1], [2, 3]]),
        ([1, 1 << 20, 1], [[1], [2], [3]]),
        ([600_000, 400_000, 100_000], [[1, 2], [3]]),
        ([1] * 300, [list(range(1, 257)), list(range(257, 301))]),
    ],
    ids=["a long one alone", "one beyond the bound", "in order", "as many as fit", "many short"],
)
async def test_a_message_has_no_more_than_fits(sizes, sent):
    unsent = OutgoingBatch()
    for number, size in enumerate(sizes, start=1):
        unsent.submit(submit(number, size))
    messages = [await unsent.message() for _ in sent]
    assert [numbers(message) for message in messages] == sent


async def test_the_largest_message_is_accepted_by_grpc():
    unsent = OutgoingBatch()
    for number in range(256):
        one = submit(number, (1 << 20) // 256 - 400)  # for all other fields of the request
        one.request.request_id = "\U0001f600" * 256
        one.prefill_addresses.extend([f"{'h' * 253}:50100"] * 64)
        one.request.sampling.CopyFrom(Sampling(stop_token_ids=[LARGEST_ID] * 16))
        unsent.submit(one)
    message = await unsent.message()
    assert len(message.submits) == 256
    assert message.ByteSize() < MAX_MESSAGE_BYTES

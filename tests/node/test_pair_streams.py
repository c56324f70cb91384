"""Pair streams between two frontends over real gRPC. The tests play both transfer threads."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import UnionType

import grpc
import grpc.aio
import msgspec
import pytest

from common import rpc
from common.errors import EngineDied, EngineFault, InvalidRequest, NodeUnavailable
from common.identity.guard import CallAuthenticator, node_name, uncounted
from common.identity.secret import new_secret, parse
from common.identity.tokens import Identity, TokenAuthentication
from common.process.ipc import FrameConnection, socket_pair
from common.request import PrefixHint, Remaining
from common.requests.namespace import as_bytes
from common.requests.sampling import SamplingParams
from common.rpc import streams
from kvtransfer.backends.base import PoolRegion
from kvtransfer.frontend_messages import (
    EndStream,
    LocalHello,
    PairClosed,
    PairInput,
    PairMessage,
    PairOpened,
    SendMessage,
)
from kvtransfer.messages import (
    CancelHandoff,
    GrantHandoff,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    InvalidatePrefix,
    OpenHandoff,
    PagesReady,
    Prompt,
    ReadsDone,
    SampledOutput,
)
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.pairs import codec
from kvtransfer.pairs.dialer import DialTimes, PairDialer
from kvtransfer.pairs.streams import PairService, PairStreams
from node.metrics import NodeMetrics
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc
from tests.support.specs import make_spec

Code = grpc.StatusCode
CONSUMER = PairHello(7, 1, {"dtype": "float32"}, (), (PoolRegion(4096, 512, 8),), "127.0.0.1:50200")
PRODUCER = PairHello(
    2**64 - 1,
    1,
    {"dtype": "float32"},
    (DataPath("tcp", b"\x00\xff"),),
    (PoolRegion(2**63, 512, 16),),
    "0.0.0.0:50100",
)
ID = HandoffId(7, 1, 1)
SAMPLING = SamplingParams(max_tokens=1, seed=1)
CONTEXT = 250_000  # tokens
QUICK = DialTimes(first_s=0.02, longest_s=0.1, refused_s=0.3, hello_s=60.0)
HELLO_S = 0.3  # where it runs out


class Transfer:
    """A transfer thread's end of its socket, and the frontend's end of it."""

    def __init__(self) -> None:
        ours, theirs = socket_pair()
        self.metrics = NodeMetrics("decode")
        self.beats = asyncio.Event()
        self.streams = PairStreams(theirs, self.metrics)
        self._socket = ours
        self._inbox: asyncio.Queue[PairInput] = asyncio.Queue()
        self._connection: FrameConnection[PairInput] = FrameConnection(
            PairInput, self._inbox.put_nowait, lambda _: None
        )

    async def start(self) -> None:
        await self._connection.open(self._socket)
        self.running = asyncio.ensure_future(self.streams.run())

    async def stop(self) -> None:
        self._connection.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    def say(self, message: msgspec.Struct) -> None:
        self._connection.send(message)

    def read(self, on: bool) -> None:
        """Set whether it reads from the connection. It reads at first."""
        transport = self._connection._transport
        transport.resume_reading() if on else transport.pause_reading()

    def die(self) -> None:
        self._connection.close()

    async def hear(self, kind: type | UnionType) -> PairInput:
        """Return the next message, which must be of this kind."""
        message = await asyncio.wait_for(self._inbox.get(), 60)
        assert isinstance(message, kind), message
        return message

    async def pairings(self, outcome: str, number: int = 1) -> None:
        """Wait until this number of pairings has the state."""
        async with asyncio.timeout(60):
            while self.sample("baton_pairings_total", outcome=outcome) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def nothing_heard(self) -> bool:
        return self._inbox.empty()

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@dataclass
class Pair:
    producer: Transfer
    consumer: Transfer
    dialer: PairDialer
    service: PairService
    address: str

    def connect(self) -> None:
        self.consumer.say(LocalHello(CONSUMER))
        self.dialer.dial(frozenset({self.address}))

    async def up(self) -> tuple[int, int]:
        """Wait until both transfer threads know the stream. Return its numbers at producer and
        consumer."""
        opened = await self.producer.hear(PairOpened)
        assert opened == PairOpened(opened.stream, CONSUMER, as_consumer=False)
        self.producer.say(SendMessage(opened.stream, PRODUCER))
        there = await self.consumer.hear(PairOpened)
        expected = msgspec.structs.replace(PRODUCER, address=self.address)
        assert there == PairOpened(there.stream, expected, as_consumer=True)
        return opened.stream, there.stream


def check_length(num_tokens: int) -> None:
    if num_tokens >= CONTEXT:
        raise InvalidRequest(f"{num_tokens} tokens are too many")


@contextlib.asynccontextmanager
async def paired(
    guard=None,
    make_channel=rpc.make_channel,
    hello_s=QUICK.hello_s,
    on_named=list,
    refused_s=QUICK.refused_s,
):
    """Args:
    guard: of the producer.
    make_channel: of the consumer.
    hello_s: how long either waits for the other's.
    on_named: of the producer's PairService.
    """
    producer, consumer = Transfer(), Transfer()
    await producer.start()
    await consumer.start()
    service = PairService(
        producer.streams, lambda: None, check_length, on_named=on_named, hello_s=hello_s
    )
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0)
    assert service.register(server, guard) == ("baton.v1.KvTransfer",)
    await server.start()
    times = replace(QUICK, hello_s=hello_s, refused_s=refused_s)
    dialer = PairDialer(consumer.streams, consumer.metrics, make_channel, times=times)
    dialling = asyncio.ensure_future(dialer.run())
    yield Pair(producer, consumer, dialer, service, f"127.0.0.1:{port}")
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert dialling.cancelled()
    await rpc.stop(server, 0.0)
    await consumer.stop()
    await producer.stop()


@pytest.fixture
async def pair():
    async with paired() as both:
        yield both


@contextlib.asynccontextmanager
async def bare_call(address: str):
    """Start a consumer without a dialer."""
    async with rpc.make_channel(address) as channel:
        call = kvtransfer_pb2_grpc.KvTransferStub(channel).Pair()
        yield call
        call.cancel()


async def end_of(call) -> tuple[grpc.StatusCode, str]:
    try:
        async with asyncio.timeout(60):
            async for _ in streams.heard(call):
                pass
    except streams.StreamStatus as end:
        return end.code, end.sentence
    pytest.fail("the producer has ended the stream without an error")


HELLO = codec.to_proto(CONSUMER, as_consumer=True)


async def test_messages_pass_both_ways_in_order_after_both_have_said_hello(pair):
    pair.connect()
    at_producer, at_consumer = await pair.up()
    upward = [
        GrantHandoff(ID, 16),
        ReadsDone(ID),
        CancelHandoff(ID, "because"),
        InvalidatePrefix(as_bytes([1, 2]), b"s" * 16),
        Heartbeat(3, 1),
    ]
    downward = [
        PagesReady(ID, 16, 32, (5,), False, None),
        PagesReady(ID, 32, 40, (9,), True, SampledOutput(2**31 - 1)),
    ]
    for message in upward:
        pair.consumer.say(SendMessage(at_consumer, message))
    for message in downward:
        pair.producer.say(SendMessage(at_producer, message))
    for message in upward:
        assert await pair.producer.hear(PairMessage) == PairMessage(at_producer, message)
    for message in downward:
        assert await pair.consumer.hear(PairMessage) == PairMessage(at_consumer, message)
    assert pair.producer.sample("baton_streams", kind="pair") == 1
    assert pair.consumer.sample("baton_pairings_total", outcome="up") == 1


async def test_no_producer_is_dialled_before_the_transfer_thread_has_said_hello(pair):
    pair.dialer.dial(frozenset({pair.address}))
    async with bare_call(pair.address) as call:  # the producer would respond
        await call.write(HELLO)
        opened = await pair.producer.hear(PairOpened)
        assert opened.hello.instance == 7
    await pair.producer.hear(PairClosed)
    assert pair.consumer.sample("baton_pairings_total", outcome="failed") == 0
    pair.connect()
    await pair.up()


async def test_a_lost_stream_is_dialled_again_under_new_numbers(pair):
    pair.connect()
    first = await pair.up()
    pair.producer.say(EndStream(first[0], "silent for 5 beats", refused=False))
    closed = await pair.consumer.hear(PairClosed)
    assert closed == PairClosed(first[1], "silent for 5 beats")
    assert await pair.producer.hear(PairClosed) == PairClosed(first[0], "silent for 5 beats")
    second = await pair.up()
    assert second[0] > first[0]
    assert second[1] > first[1]
    # Messages for the old stream are dropped.
    pair.producer.say(SendMessage(first[0], Heartbeat(9, 9)))
    pair.producer.say(SendMessage(second[0], Heartbeat(1, 0)))
    assert await pair.consumer.hear(PairMessage) == PairMessage(second[1], Heartbeat(1, 0))


async def test_the_consumer_may_end_a_stream_too(pair):
    pair.connect()
    _, at_consumer = await pair.up()
    pair.consumer.say(EndStream(at_consumer, "no link", refused=False))
    assert await pair.consumer.hear(PairClosed) == PairClosed(at_consumer, "no link")
    await pair.producer.hear(PairClosed)
    await pair.up()


async def test_a_rejected_pair_is_reported_on_both_sides_and_dialled_again_later(pair, caplog):
    pair.connect()
    opened = await pair.producer.hear(PairOpened)
    sentence = "x cannot pair: dtype is 'float32' here and 'bfloat16' there."
    refused_at = time.monotonic()
    pair.producer.say(EndStream(opened.stream, sentence, refused=True))
    assert await pair.producer.hear(PairClosed) == PairClosed(opened.stream, sentence)
    await pair.up()
    assert time.monotonic() - refused_at > 0.8 * QUICK.refused_s
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "refused=True" in warnings[0]
    assert "bfloat16" in warnings[0]
    assert pair.consumer.sample("baton_pairings_total", outcome="refused") == 1


async def test_a_consumer_that_rejects_a_pair_waits_as_long(pair):
    pair.connect()
    _, at_consumer = await pair.up()
    refused_at = time.monotonic()
    pair.consumer.say(EndStream(at_consumer, "0.0.0.0:50100 cannot pair", refused=True))
    await pair.consumer.hear(PairClosed)
    await pair.producer.hear(PairClosed)
    await pair.up()
    assert time.monotonic() - refused_at > 0.8 * QUICK.refused_s


async def test_a_consumer_with_other_weights_reports_them_when_it_dials_again(pair):
    pair.connect()
    _, at_consumer = await pair.up()
    changed = CONSUMER.with_weights(b"w" * 16)
    pair.consumer.say(LocalHello(changed))
    pair.consumer.say(EndStream(at_consumer, "the node has other weights now", refused=False))
    await pair.consumer.hear(PairClosed)
    heard = [await pair.producer.hear(PairClosed | PairOpened) for _ in range(2)]  # in any order
    assert [each.hello for each in heard if isinstance(each, PairOpened)] == [changed]


async def test_a_consumer_with_a_new_hello_does_not_wait():
    async with paired(refused_s=3600.0) as pair:
        pair.connect()
        at_producer = (await pair.producer.hear(PairOpened)).stream
        pair.producer.say(EndStream(at_producer, "they differ", refused=True))
        await pair.consumer.pairings("refused")
        changed = CONSUMER.with_weights(b"w" * 16)
        pair.consumer.say(LocalHello(changed))
        await pair.producer.hear(PairClosed)
        assert (await pair.producer.hear(PairOpened)).hello == changed


async def test_a_producer_that_is_not_up_yet_is_dialled_until_it_is(pair):
    pair.consumer.say(LocalHello(CONSUMER))
    pair.dialer.dial(frozenset({"127.0.0.1:9"}))
    await pair.consumer.pairings("failed", 3)
    pair.dialer.dial(frozenset({"127.0.0.1:9", pair.address}))
    await pair.up()


async def test_a_producer_removed_from_the_list_is_disconnected(pair):
    pair.connect()
    at_producer, at_consumer = await pair.up()
    pair.dialer.dial(frozenset())
    assert (await pair.consumer.hear(PairClosed)).stream == at_consumer
    assert (await pair.producer.hear(PairClosed)).stream == at_producer
    pair.dialer.dial(frozenset({pair.address}))
    await pair.up()


async def test_a_producer_without_a_hello_is_abandoned_and_dialled_again():
    async with paired(hello_s=HELLO_S) as pair:
        pair.connect()
        first = await pair.producer.hear(PairOpened)
        assert (await pair.producer.hear(PairClosed)).stream == first.stream
        assert (await pair.producer.hear(PairOpened)).stream > first.stream


async def test_a_silent_call_is_ended():
    async with paired(hello_s=HELLO_S) as pair, bare_call(pair.address) as call:
        assert await end_of(call) == (Code.DEADLINE_EXCEEDED, "no Hello within 0.3 s")


async def test_a_call_that_starts_without_hello_is_ended(pair):
    async with bare_call(pair.address) as call:
        await call.write(
            kvtransfer_pb2.FromConsumer(heartbeat=kvtransfer_pb2.Heartbeat(sequence=1))
        )
        code, sentence = await end_of(call)
        assert code is Code.FAILED_PRECONDITION
        assert "not Hello" in sentence


@pytest.mark.parametrize(
    "bad",
    [
        HELLO,
        kvtransfer_pb2.FromConsumer(),
        kvtransfer_pb2.FromConsumer(grant=kvtransfer_pb2.Grant(prefix_tokens=1)),
    ],
    ids=["second Hello", "empty message", "Grant without an id"],
)
async def test_a_protocol_violation_ends_the_stream_with_a_sentence(pair, bad):
    async with bare_call(pair.address) as call:
        await call.write(HELLO)
        opened = await pair.producer.hear(PairOpened)
        await call.write(bad)
        code, sentence = await end_of(call)
        assert code is Code.FAILED_PRECONDITION
        closed = await pair.producer.hear(PairClosed)
        assert closed == PairClosed(opened.stream, sentence)
        assert sentence


async def test_an_undecodable_message_ends_the_stream(pair):
    async with rpc.make_channel(pair.address) as channel:
        parse = kvtransfer_pb2.FromProducer.FromString
        call = channel.stream_stream("/baton.v1.KvTransfer/Pair", response_deserializer=parse)()
        await call.write(HELLO.SerializeToString())
        await pair.producer.hear(PairOpened)
        await call.write(b"\xff\xff\xff")
        assert (await end_of(call))[0] is Code.INVALID_ARGUMENT
        await pair.producer.hear(PairClosed)


async def test_a_producer_with_undecodable_responses_is_dialled_again():
    class Garbage(grpc.GenericRpcHandler):
        def service(self, details):
            async def pair(messages, context):
                async for _ in messages:
                    calls.put_nowait(details.method)
                    await context.write(b"\xff\xff\xff")

            return grpc.stream_stream_rpc_method_handler(pair)

    calls: asyncio.Queue[str] = asyncio.Queue()
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0)
    server.add_generic_rpc_handlers((Garbage(),))
    await server.start()
    consumer = Transfer()
    await consumer.start()
    dialer = PairDialer(consumer.streams, consumer.metrics, times=QUICK)
    dialling = asyncio.ensure_future(dialer.run())
    consumer.say(LocalHello(CONSUMER))
    dialer.dial(frozenset({f"127.0.0.1:{port}"}))
    for _ in range(3):
        assert await asyncio.wait_for(calls.get(), 60) == "/baton.v1.KvTransfer/Pair"
    assert not dialling.done()
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    await rpc.stop(server, 0.0)
    await consumer.stop()


# Seen failing without the check of the length in PairService: the stream ends because of its
# tokens.
@pytest.mark.parametrize("num_predicted", [0, CONTEXT - 1])
async def test_an_open_longer_than_the_context_is_answered_before_its_tokens_are_read(
    pair, num_predicted
):
    # Without sampling: reading the rest of it would end the stream.
    tokens = {"token_ids": bytes(4 * (CONTEXT - num_predicted))}
    prompt = {"request": {**tokens, "prediction": bytes(4 * num_predicted)}}
    long = kvtransfer_pb2.Open(prompt=prompt, id=kvtransfer_pb2.HandoffId(instance=7, attempt=1))
    async with bare_call(pair.address) as call:
        await call.write(HELLO)
        stream = (await pair.producer.hear(PairOpened)).stream
        await call.write(kvtransfer_pb2.FromConsumer(open=long))
        answer = codec.parse(await asyncio.wait_for(call.read(), 60))
        sentence = f"{CONTEXT} tokens are too many"
        assert answer == HandoffFailed(HandoffId(7, 0, 1), sentence, retryable=False)
        await call.write(codec.to_proto(Heartbeat(1, 0), as_consumer=True))
        assert await pair.producer.hear(PairMessage) == PairMessage(stream, Heartbeat(1, 0))


async def test_nodes_named_by_a_consumer_with_a_prompt_are_reported():
    named = []
    hints = (PrefixHint("10.0.0.1:50100", 64), PrefixHint("node:1", 1 << 31))
    prompts = [
        OpenHandoff(HandoffId(7, n, 1), b"", Remaining(60.0), Prompt(make_spec([5]), reported))
        for n, reported in ((1, ()), (2, hints))
    ]
    async with paired(on_named=named.extend) as pair, bare_call(pair.address) as call:
        await call.write(HELLO)
        await pair.producer.hear(PairOpened)
        for message in (*prompts, Heartbeat(1, 0)):
            await call.write(codec.to_proto(message, as_consumer=True))
        for message in (*prompts, Heartbeat(1, 0)):
            assert (await pair.producer.hear(PairMessage)).message == message
        assert named == ["10.0.0.1:50100", "node:1"]


# Seen failing with the lines of pair streams written by `log.info`: 120.
async def test_consumers_that_reconnect_often_write_few_log_lines_including_the_first(pair, caplog):
    caplog.set_level(logging.INFO)
    begin = time.monotonic()
    for _ in range(60):
        async with bare_call(pair.address) as call:
            await call.write(HELLO)
            await pair.producer.hear(PairOpened)
        await pair.producer.hear(PairClosed)
    lines = [line for line in caplog.messages if line.startswith("pair stream")]
    assert lines[0].startswith("pair stream opened stream=1 ")
    assert lines[1].startswith("pair stream closed stream=1 ")
    num_intervals = 1 + (time.monotonic() - begin) // 10.0
    assert len(lines) <= 2 * 10 * num_intervals


async def test_a_starting_or_draining_producer_accepts_no_stream_and_keeps_its_own(pair):
    pair.connect()
    at_producer, at_consumer = await pair.up()
    pair.service.drain()
    async with bare_call(pair.address) as call:
        # Nothing is written: grpcio makes INTERNAL of a write that coincides with the end of its
        # call.
        assert await end_of(call) == (Code.UNAVAILABLE, "the node is draining")
    pair.producer.say(SendMessage(at_producer, Heartbeat(1, 0)))
    assert await pair.consumer.hear(PairMessage) == PairMessage(at_consumer, Heartbeat(1, 0))


async def test_the_end_of_the_producer_reaches_its_consumers_after_its_last_message(pair):
    pair.connect()
    at_producer, at_consumer = await pair.up()
    pair.producer.say(SendMessage(at_producer, Heartbeat(1, 0)))
    assert await pair.consumer.hear(PairMessage) == PairMessage(at_consumer, Heartbeat(1, 0))
    pair.producer.streams.close_all(NodeUnavailable("the node has ended: drained"))
    closed = await pair.consumer.hear(PairClosed)
    assert closed == PairClosed(at_consumer, "the node has ended: drained")


# Seen failing with only the status to report it ("Internal error from Core"), with `call.read` in
# `last_words.heard`, and with a dialer for which a failed write ends the stream.
async def test_a_consumer_whose_write_failed_still_learns_that_the_producers_engine_has_crashed():
    calls = []

    def make_channel(address: str) -> grpc.aio.Channel:
        channel = rpc.make_channel(address)
        stream_stream = channel.stream_stream

        def opened(*arguments, **options):
            method = stream_stream(*arguments, **options)
            return lambda: calls.append(method()) or calls[-1]

        channel.stream_stream = opened
        return channel

    async with paired(make_channel=make_channel) as pair:
        pair.connect()
        at_producer, at_consumer = await pair.up()
        # After a failed write, grpcio gives the call this status.
        calls[-1]._cython_call.set_internal_error("a write has failed")
        pair.consumer.say(SendMessage(at_consumer, Heartbeat(1, 0)))
        for sequence in (1, 2):
            pair.producer.say(SendMessage(at_producer, Heartbeat(sequence, 0)))
            heard = await pair.consumer.hear(PairMessage)
            assert heard == PairMessage(at_consumer, Heartbeat(sequence, 0))
        pair.producer.streams.close_all(EngineDied("the node has ended: killed by SIGKILL"))
        closed = await pair.consumer.hear(PairClosed)
        assert closed == PairClosed(at_consumer, "the node has ended: killed by SIGKILL", True)


async def test_a_status_lost_by_a_failed_write_is_reported_as_lost():
    async with paired(hello_s=HELLO_S) as pair, bare_call(pair.address) as call:
        call._cython_call.set_internal_error("a write has failed")
        code, sentence = await end_of(call)
        assert code is Code.INTERNAL and "its status was lost" in sentence


async def test_the_end_of_a_transfer_thread_is_an_error_of_its_node(pair):
    pair.producer.die()
    with pytest.raises(EngineFault, match="transfer thread"):
        await asyncio.wait_for(pair.producer.running, 60)
    async with bare_call(pair.address) as call:
        await call.write(HELLO)
        assert (await end_of(call))[0] is Code.UNAVAILABLE


async def test_a_peer_over_the_limit_of_unread_messages_is_not_read_and_delays_no_other(pair):
    """Seen failing without `room` in PairStream.take: all of it is taken, 140 < 70."""
    flooding = Prompt(make_spec(range(2**27, 2**27 + 200_000)))
    long = codec.to_proto(OpenHandoff(ID, b"", Remaining(60.0), flooding), as_consumer=True)
    async with bare_call(pair.address) as flood, bare_call(pair.address) as other:
        await flood.write(HELLO)
        flooding = (await pair.producer.hear(PairOpened)).stream
        await other.write(
            codec.to_proto(msgspec.structs.replace(CONSUMER, instance=8), as_consumer=True)
        )
        steady = (await pair.producer.hear(PairOpened)).stream
        pair.producer.read(False)
        num_written = 0

        async def write() -> None:
            nonlocal num_written
            for _ in range(140):  # 140 MB
                await flood.write(long)
                num_written += 1

        writing = asyncio.ensure_future(write())
        await settled(lambda: num_written)
        assert num_written < 70
        await other.write(codec.to_proto(Heartbeat(1, 0), as_consumer=True))
        pair.producer.read(True)
        streams = [(await pair.producer.hear(PairMessage)).stream for _ in range(141)]
        assert streams.count(flooding) == 140
        assert streams.index(steady) < 20
        await writing
    assert not pair.producer.running.done()


async def settled(number: Callable[[], int]) -> None:
    """Wait until a growing number has stopped growing for a while."""
    before = -1
    while number() != before:
        before = number()
        await asyncio.sleep(0.5)


# Identities ---------------------------------------------------------------------------------------

SECRET = new_secret()


def identity(role, name, text=SECRET):
    class Keys:
        def current(self):
            return parse(text, "the test", role)

    return Identity(role, name, Keys(), uncounted)


def producers_guard():
    return CallAuthenticator(
        TokenAuthentication(identity("node", node_name(PRODUCER.instance))), uncounted
    )


def channels_of(who):
    return functools.partial(rpc.make_channel, identity=who)


async def test_nodes_of_one_secret_pair():
    consumer = identity("node", node_name(CONSUMER.instance))
    async with paired(producers_guard(), channels_of(consumer)) as pair:
        pair.connect()
        await pair.up()


@pytest.mark.parametrize(
    "who, sentence",
    [
        (None, "has no cluster secret"),
        (identity("node", node_name(CONSUMER.instance), new_secret()), "another secret"),
        (identity("router", node_name(CONSUMER.instance)), "router may not call"),
        # A consumer for which pages are published and data keys are made.
        (identity("node", node_name(8)), "Hello is of instance 0000000000000007, the token of"),
    ],
    ids=["nobody", "a stranger", "a router", "another consumer"],
)
async def test_a_node_cannot_pair_as_another_consumer(who, sentence, caplog):
    async with paired(producers_guard(), channels_of(who)) as pair:
        pair.connect()
        await pair.consumer.pairings("refused")
        (reported,) = [r for r in caplog.records if "not paired" in r.message]
        assert reported.levelno == logging.WARNING and sentence in reported.message
        assert pair.producer.nothing_heard()


async def test_a_consumer_accepts_no_producer_that_does_not_prove_its_identity(caplog):
    async with paired(None, channels_of(identity("node", node_name(CONSUMER.instance)))) as pair:
        pair.connect()
        await pair.consumer.pairings("refused")
        assert "did not prove that it is a node of this cluster" in caplog.text
        assert pair.producer.nothing_heard() and pair.consumer.nothing_heard()

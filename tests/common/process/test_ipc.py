"""Frames between a node's two processes: bounds, order, ends."""

import asyncio
import socket
import threading
import time

import msgspec
import pytest

from common.process.ipc import (
    MAX_DRAIN_BYTES,
    MAX_FRAME_BYTES,
    Backlogged,
    FrameConnection,
    FrameDecoder,
    FrameError,
    FrameSocket,
    PeerGone,
    encode_frame,
    socket_pair,
)
from node.engine_process import EngineChannel


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    body: bytes = b""


class Other(msgspec.Struct, frozen=True, tag=True):
    name: str


Either = Note | Other


def test_messages_can_be_cut_anywhere():
    stream = encode_frame(Note(1, b"x" * 300)) + encode_frame(Other("ä")) + encode_frame(Note(2))
    for size in (1, 2, 3, 5, 7, 64, len(stream)):
        decoder: FrameDecoder[Either] = FrameDecoder(Either)
        messages = []
        for start in range(0, len(stream), size):
            messages += decoder.feed(stream[start : start + size])
        assert messages == [Note(1, b"x" * 300), Other("ä"), Note(2)]


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x03\x00\x00\x00abc",
        encode_frame(msgspec.defstruct("SomeoneElses", [], tag=True)()),
    ],
    ids=["announced too long", "not msgpack", "another union's message"],
)
def test_an_invalid_frame_is_rejected(data):
    with pytest.raises(FrameError):
        FrameDecoder(Either).feed(data)


def test_a_message_too_large_for_a_frame_is_rejected_by_its_sender():
    with pytest.raises(FrameError, match="Note takes"):
        encode_frame(Note(1, bytes(MAX_FRAME_BYTES)))


@pytest.fixture
def pair():
    ours, theirs = socket_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def frames(pair):
    """Return both ends of the pair as sockets of a thread."""
    ours, theirs = pair
    return FrameSocket(ours, Either), FrameSocket(theirs, Either)


def test_a_thread_never_blocks_on_a_frontend_that_does_not_read_and_loses_nothing(frames):
    sender, receiver = frames
    sent = [Note(i, bytes(100_000)) for i in range(100)]
    for note in sent:
        sender.send(note)
    assert sender.wants_write
    received: list[Either] = []
    while len(received) < len(sent):
        received += receiver.receive()
        sender.flush()
    assert received == sent
    assert not sender.wants_write


def test_a_frontend_that_does_not_read_beyond_the_limit_is_an_error(pair):
    ours, _ = pair
    sender: FrameSocket[Either] = FrameSocket(ours, Either, max_backlog_bytes=1 << 20)

    def fill() -> None:
        for i in range(1000):
            sender.send(Note(i, bytes(100_000)))

    with pytest.raises(Backlogged):
        fill()


@pytest.mark.parametrize("sends_first", [False, True])
def test_end_of_file_arrives_after_every_sent_message(frames, sends_first):
    """`receive` reports the end, and `send` does not, even after a failed send."""
    sender, receiver = frames
    assert receiver.receive() == []
    sender.send(Note(1))
    sender.close()
    if sends_first:
        receiver.send(Note(2))
    assert receiver.receive() == [Note(1)]
    with pytest.raises(PeerGone):
        receiver.receive()
    receiver.send(Note(3))


async def frontend(sock: socket.socket) -> "tuple[FrameConnection[Either], asyncio.Future[str]]":
    """Return the frontend's end of a socket, and the future reason of its end."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection: FrameConnection[Either] = FrameConnection(Either, print, ended.set_result)
    await connection.open(sock)
    return connection, ended


async def test_bytes_that_are_no_frame_end_the_frontends_connection(pair):
    ours, theirs = pair
    _, ended = await frontend(ours)
    theirs.sendall(b"\xff\xff\xff\xff")
    assert "was announced" in await asyncio.wait_for(ended, 60)


async def test_a_frontend_that_closes_is_not_notified_of_its_own_end(pair):
    ours, theirs = pair
    front, ended = await frontend(ours)
    front.close()
    front.close()
    engine: FrameSocket[Either] = FrameSocket(theirs, Either)
    while True:
        try:
            engine.receive()
        except PeerGone:
            break
        await asyncio.sleep(0)
    assert not ended.done()


async def test_an_engine_that_does_not_read_beyond_the_limit_is_an_error(pair):
    ours, _theirs = pair
    front, ended = await frontend(ours)

    for i in range(200):
        assert not ended.done() or i > 100
        front.send(Note(i, bytes(1 << 20)))
    assert "an engine that does not read" in await ended


def test_an_engine_thread_sleeps_until_the_frontend_or_another_thread_wakes_it(pair):
    ours, theirs = pair
    front: FrameSocket[Either] = FrameSocket(theirs, Either)
    channel = EngineChannel(FrameSocket(ours, Either), socket.socket())
    begun = time.monotonic()
    channel.wait(0.05)
    assert time.monotonic() - begun > 0.04
    channel.wake()
    channel.wake()
    channel.wait(30)  # came before the sleep, and is not lost
    begun = time.monotonic()
    channel.wait(0.05)  # two wake-ups are one
    assert time.monotonic() - begun > 0.04
    waker = threading.Timer(0.05, channel.wake)
    waker.start()
    channel.wait(30)
    waker.join()
    front.send(Note(1))
    channel.wait(30)
    assert channel.take() == [Note(1)]
    front.close()
    channel.wait(30)
    assert time.monotonic() - begun < 30  # no sleep reached its time limit
    with pytest.raises(PeerGone):
        channel.take()
    channel.close()


def test_queued_messages_to_a_slow_frontend_are_sent_while_the_engine_thread_sleeps(pair):
    ours, theirs = pair
    front: FrameSocket[Either] = FrameSocket(theirs, Either)
    channel = EngineChannel(FrameSocket(ours, Either), socket.socket())
    sent = [Note(i, bytes(100_000)) for i in range(100)]
    for note in sent:
        channel.post(note)
    received: list[Either] = []
    while len(received) < len(sent):
        received += front.receive()
        channel.wait(0.0)
    assert received == sent
    channel.close()


class Torrent:
    """A socket whose other end always has more data."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._frame = encode_frame(Note(1, bytes(1000)))

    def setblocking(self, _: bool) -> None:
        pass

    def recv(self, most: int) -> bytes:
        assert self.num_bytes < 64 << 20
        data = self._frame * (most // len(self._frame))
        self.num_bytes += len(data)
        return data


# Seen failing without a limit in FrameSocket.receive: it never returns.
def test_a_faster_peer_does_not_keep_the_reader_in_one_call():
    torrent = Torrent()
    frames: FrameSocket[Note] = FrameSocket(torrent, Note)  # type: ignore[arg-type]
    assert frames.receive()
    assert torrent.num_bytes <= 2 * MAX_DRAIN_BYTES

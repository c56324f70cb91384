"""Messages between the server process and the engine process of a node, over a unix socket.

A frame is a 4-byte little-endian length, then msgpack. Each end decodes a tagged union. The end of
the socket is an event for both ends, and no frame is dropped before it.

`CallLane` adds backpressure for streams that share the socket to the engine process. If the engine
reads more slowly than a peer sends, that peer's stream is not read, and gRPC's flow control stops
the peer. Other streams continue.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

# The longest prompt, 4 Mi tokens, has 16 MiB as int32 and 20 MiB as msgpack integers.
MAX_FRAME_BYTES = 32 << 20
# Bytes that may wait for an end that does not read now, such as during a forward pass of seconds.
MAX_BACKLOG_BYTES = 128 << 20
# Limit of one `receive`, so that a busy sender cannot occupy the caller.
MAX_DRAIN_BYTES = 1 << 20
# The frontend counts as behind above the first limit, until its backlog falls to the second.
BEHIND_BYTES = 1 << 20
CAUGHT_UP_BYTES = 256 << 10
_CHUNK_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Received bytes are not a frame, or a message is too large for one. This is a bug of Baton."""


class PeerGone(Exception):
    """The other process has closed its end or crashed."""


class Backlogged(Exception):
    """The other process has not read for so long that the backlog limit is reached."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return the message as a frame. Raises FrameError if it is longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"{type(message).__name__} takes {len(body)} bytes, {MAX_FRAME_BYTES} fit into a frame"
        )
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """Splits a byte stream into messages of one tagged union.

    Args:
        union: msgspec type of the accepted messages.
    """

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Add bytes and return the messages that they complete, in order. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes was announced")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        del buffer[:start]
        return messages

    def _decode(self, body: bytes) -> T:
        try:
            return cast(T, self._decoder.decode(body))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise FrameError(f"not a message of this socket: {error}") from error


class FrameSocket(Generic[T]):
    """The engine process's end of the socket, for one thread. No call blocks.

    Bytes that the kernel does not accept immediately are kept for the next `send` or `receive`. A
    thread that sleeps on `fileno` must also wait for writability while `wants_write`.

    Args:
        sock: connected stream socket, owned by this object from now on.
        receives: tagged union that the other process sends.
        max_backlog_bytes: limit for a frontend that does not read.
    """

    def __init__(
        self, sock: socket.socket, receives: Any, *, max_backlog_bytes: int = MAX_BACKLOG_BYTES
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._outgoing = bytearray()
        self._max_backlog_bytes = max_backlog_bytes
        self._ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing) and not self._ended

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, or keep it for later. `receive` reports the end of the frontend.

        Raises:
            Backlogged: the frontend is stuck, and the node cannot continue.
            FrameError: the message is too large.
        """
        if self._ended:
            return
        self._outgoing += encode_frame(message)
        self.flush()
        if len(self._outgoing) > self._max_backlog_bytes:
            raise Backlogged(f"{len(self._outgoing)} bytes wait for a frontend that does not read")

    def flush(self) -> None:
        """Send as many of the waiting bytes as the kernel accepts."""
        while self._outgoing and not self._ended:
            try:
                sent = self._socket.send(memoryview(self._outgoing)[:_CHUNK_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # The frontend's last messages before its end are still to be read. `receive`
                # reports the end.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[T]:
        """Return all messages that have arrived, in order.

        Raises:
            PeerGone: the other end is closed, and all its messages were returned before.
            FrameError: the bytes are not a message of this socket.
        """
        self.flush()
        messages: list[T] = []
        drained = 0
        while drained < MAX_DRAIN_BYTES and not self._ended:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return messages
            except OSError:
                data = b""
            if not data:
                self._ended = True
                break
            drained += len(data)
            messages += self._decoder.feed(data)
            if len(data) < _CHUNK_BYTES:
                return messages  # no more bytes: another call would cost as much as this one
        if self._ended and not messages:
            raise PeerGone("the frontend has closed its end")
        return messages

    def close(self) -> None:
        """Close the socket. The other process sees end of file. Idempotent."""
        self._ended = True
        self._socket.close()


class WakeUp:
    """The sleep of the thread that uses a FrameSocket. Other threads can end it.

    Any thread may call `wake`, even after the sleeper has ended. Therefore the descriptor is closed
    only when nothing refers to this object any more.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Return the eventfd that `wake` writes to."""
        return self._fd

    def wake(self) -> None:
        """End the current or the next `sleep`. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget the calls of `wake` until now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def watch(self, descriptor: int) -> None:
        """Make `sleep` return at once while this descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def sleep(self, frames: FrameSocket[Any], timeout_s: float) -> None:
        """Sleep until the socket can be used, `wake` is called, or the timeout expires."""
        events = select.POLLIN | (select.POLLOUT if frames.wants_write else 0)
        self._poll.register(frames, events)
        ready = self._poll.poll(max(0.0, timeout_s) * 1000.0)
        if any(fd == self._fd for fd, _ in ready):
            self.clear()


class FrameConnection(asyncio.Protocol, Generic[T]):
    """The frontend's end of the socket, on its event loop.

    Args:
        receives: tagged union that the engine process sends.
        on_message: called with each message, in order. Must not block.
        on_end: called once with the reason when the other end is closed, has sent an invalid frame,
            or does not read. Not called after `close`.
    """

    def __init__(
        self, receives: Any, on_message: Callable[[T], None], on_end: Callable[[str], None]
    ) -> None:
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._ended = False
        self._caught_up = asyncio.Event()
        self._caught_up.set()
        self.num_bytes_sent = 0  # total, whether the engine has read them or not

    async def open(self, sock: socket.socket) -> None:
        """Start on a connected unix socket, owned by this object from now on."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait in this process because the engine process has not read them."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def is_behind(self) -> bool:
        """True if more than BEHIND_BYTES wait, until they fall to the lower limit.

        False once the socket has ended.
        """
        return not self._caught_up.is_set()

    async def caught_up(self) -> None:
        await self._caught_up.wait()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, or keep it until the engine reads. If the engine is stuck, the socket
        ends. No effect after the end of the socket.

        Raises:
            FrameError: the message is too large.
        """
        frame = encode_frame(message)
        if self._ended:
            return
        if self._transport is None or self.backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
            self.end(f"{self.backlog_bytes} bytes wait for an engine that does not read")
            return
        self.num_bytes_sent += len(frame)
        self._transport.write(frame)

    def close(self) -> None:
        """Close the socket.

        The other process sees end of file. `on_end` is not called. Idempotent.
        """
        self._ended = True
        self._caught_up.set()
        if self._transport is not None:
            # close() would wait for a stuck engine to read the rest.
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(BEHIND_BYTES, CAUGHT_UP_BYTES)

    def pause_writing(self) -> None:
        if not self._ended:
            self._caught_up.clear()

    def resume_writing(self) -> None:
        self._caught_up.set()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            messages = self._decoder.feed(data)
        except FrameError as error:
            self.end(str(error))
            return
        for message in messages:
            if not self._ended:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.end("end of file" if error is None else str(error))

    def end(self, reason: str) -> None:
        """Close the socket because of this fault. Idempotent."""
        if self._ended:
            return
        self.close()
        self._on_end(reason)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected stream sockets whose buffers hold more than a step's messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        with contextlib.suppress(OSError):  # only a hint: the system's limit may be lower
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ours, theirs


MAX_WAITING_BYTES = 1 << 20  # limit of one stream
# Limit of all streams together: half of the limit that ends a node.
MAX_LANES_BYTES = 64 << 20
STUCK_S = 30.0  # seconds without reading after which an engine process counts as stuck


class CallLane:
    """Backpressure for one stream on the shared socket. Event loop only.

    Args:
        connection: shared by all streams.
        max_waiting_bytes: limit of unread bytes of this stream.
        stuck_s: longest time without progress of the engine process, in seconds.
    """

    def __init__(
        self,
        connection: FrameConnection[Any],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._connection = connection
        self._max_waiting_bytes = max_waiting_bytes
        self._stuck_s = stuck_s
        self._num_bytes = 0  # bytes sent since this stream last had none waiting
        self._end = 0  # position of the last of them, in bytes sent on the connection

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting for room. See FrameConnection.send."""
        connection = self._connection
        if self._taken >= self._end:
            self._num_bytes = 0
        begin = connection.num_bytes_sent
        connection.send(message)
        self._end = connection.num_bytes_sent
        self._num_bytes += self._end - begin

    async def room(self) -> None:
        """Wait until this stream may send more. Call it before the next read from the stream. If
        the engine process reads nothing at all, the socket ends.
        """
        connection = self._connection
        while connection.is_behind and self._is_full:
            before = self._taken
            try:
                async with asyncio.timeout(self._stuck_s):
                    await connection.caught_up()
            except TimeoutError:
                if self._taken == before:
                    waiting = connection.backlog_bytes
                    connection.end(
                        f"{waiting} bytes wait, and nothing was read for {self._stuck_s:g} s"
                    )

    @property
    def _taken(self) -> int:
        """Bytes sent on the connection that no longer wait in this process."""
        return self._connection.num_bytes_sent - self._connection.backlog_bytes

    @property
    def _is_full(self) -> bool:
        mine = self._num_bytes if self._taken < self._end else 0
        backlog = self._connection.backlog_bytes
        return mine > self._max_waiting_bytes or backlog > MAX_LANES_BYTES

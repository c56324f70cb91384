"""The publisher of KV events over ZMQ, compatible with vLLM. Event loop only.

Subscribers of the PUB socket get the parts topic, sequence number (8 bytes, big-endian, unsigned)
and payload. A subscriber that missed batches requests a replay from the ROUTER socket: it sends an
empty part and the first number. Each reply has an empty part, a number and a payload. The last
reply has the number -1 and no payload.

No call blocks: ZMQ drops batches for which a slow subscriber has no room.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from common.config.node import KvEventsConfig
from common.errors import ConfigError
from common.identity.program import is_loopback
from common.logs import kv

log = logging.getLogger(__name__)

MAX_BUFFER_BYTES = 256 << 20
_MAX_RECEIVED_BYTES = 1024  # subscriptions and requests for a replay are shorter
_MAX_UNSENT_REPLIES = 64  # to each reader
_REPLAY_S = 30.0  # for a reader to read its replay
_RETRY_S = 0.01
_END = (-1).to_bytes(8, "big", signed=True)


class ZmqPublisher:
    """Numbers the engine's batches and sends them to the subscribers. Must be closed.

    Raises:
        ConfigError: an endpoint is not available.
    """

    def __init__(self, config: KvEventsConfig, zmq: ModuleType, zmq_asyncio: ModuleType) -> None:
        self._zmq = zmq
        self._asyncio = zmq_asyncio
        self._topic = config.topic.encode()
        self._numbers = itertools.count()
        self._buffer: deque[tuple[bytes, bytes]] = deque()  # number, payload
        self._max_buffered = config.buffer_steps if config.replay_endpoint else 0
        self._buffer_bytes = 0
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._events = self._socket(zmq.PUB, config.hwm)
            _attach(self._events, config.endpoint, "endpoint", zmq=zmq, connect=config.connect)
            if config.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, _MAX_UNSENT_REPLIES)
                _attach(self._replay, config.replay_endpoint, "replay_endpoint", zmq=zmq)
        except ConfigError:
            self.close()
            raise

    def publish(self, payload: bytes) -> None:
        """Send a batch to the subscribers that have room for it."""
        number = next(self._numbers).to_bytes(8, "big")
        self._events.send_multipart((self._topic, number, payload), self._zmq.NOBLOCK)
        self._buffer.append((number, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._max_buffered or self._buffer_bytes > MAX_BUFFER_BYTES:
            self._buffer_bytes -= len(self._buffer.popleft()[1])

    def background(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return () if self._replay is None else (self._serve_replays(),)

    async def _serve_replays(self) -> None:
        """Serve replays, one subscriber after the other."""
        requests = self._asyncio.Socket(shadow=self._replay)
        while True:
            match await requests.recv_multipart():
                case [reader, b"", first] if len(first) == 8:
                    await self._answer(reader, first)
                case _:
                    log.debug("a request for a replay of KV events is invalid")

    async def _answer(self, reader: bytes, first: bytes) -> None:
        replies = [reply for reply in self._buffer if reply[0] >= first]
        try:
            async with asyncio.timeout(_REPLAY_S):
                for reply in (*replies, (_END, b"")):
                    await self._reply((reader, b"", *reply))
                    await asyncio.sleep(0)  # let other work of this process run
        except (TimeoutError, self._zmq.ZMQError):
            log.warning("a reader has not read its replay of KV events")

    async def _reply(self, parts: tuple[bytes, ...]) -> None:
        # An asyncio socket would spin while this subscriber has no room and another one has.
        while True:
            try:
                self._replay.send_multipart(parts, self._zmq.NOBLOCK)
                return
            except self._zmq.Again:
                await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        """Close the sockets. Unsent batches are dropped."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        if kind == self._zmq.ROUTER:  # so that a subscriber without room raises an error
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        return socket


@contextmanager
def publishing(config: KvEventsConfig) -> Iterator["ZmqPublisher | None"]:
    """Yield the configured publisher, if any, and close it.

    Raises:
        ConfigError: pyzmq is missing, an endpoint is not available, or it is not on loopback and
            `insecure` is not set.
    """
    if config.publisher == "null":
        yield None
        return
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise ConfigError(
            "--kv-events.publisher zmq needs pyzmq: pip install 'baton-serving[kv-events]'"
        ) from None
    for name in ("endpoint", "replay_endpoint"):
        _check_exposure(name, getattr(config, name), insecure=config.insecure)
    publisher = ZmqPublisher(config, zmq, zmq.asyncio)
    try:
        yield publisher
    finally:
        publisher.close()


def _check_exposure(name: str, endpoint: str | None, *, insecure: bool) -> None:
    if endpoint is None or insecure or not endpoint.startswith("tcp://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not is_loopback(host):  # `*` is not loopback either
        raise ConfigError(
            f"--kv-events.{name.replace('_', '-')} {endpoint} is beyond this host, and ZMQ neither "
            "authenticates nor encrypts: readers get the token ids of all prompts and responses. "
            "Set --kv-events.insecure in a trusted network"
        )


def _attach(
    socket: Any, endpoint: str, name: str, *, zmq: ModuleType, connect: bool = False
) -> None:
    try:
        (socket.connect if connect else socket.bind)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events.{name.replace('_', '-')} {endpoint} is not available: {error}"
        ) from None
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    log.info("publishing KV events %s", kv(**{name: address}))

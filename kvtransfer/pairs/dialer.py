"""The consumer's side of pairing: keeps one pair stream open to each listed producer.

Nodes may start in any order, so an address that does not respond is dialled again. The wait is
shorter after a lost stream than after a refusal, which only a restart of either node can fix. The
dialer dials again immediately when this node's Hello changes. `NamedProducers` keeps the addresses
to dial: those on the router's list, and a bounded number of recently used others.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
import msgspec

from common import rpc
from common.errors import (
    NodeUnavailable,
    ProtocolViolation,
    ServingError,
)
from common.logs import ThrottledLog
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec
from kvtransfer.pairs.streams import REFUSALS, PairMetrics, PairStreams, incoming, write
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DialTimes:
    """Waits of the dialer, in seconds."""

    first_s: float = 0.2  # after the first failure; doubles with each further one
    longest_s: float = 5.0
    refused_s: float = 30.0
    # From the dial to the producer's Hello. Longer than WAIT_S of transfer/producer.py.
    hello_s: float = 15.0


@dataclass(frozen=True, slots=True)
class _Over:
    """The end of one stream or of one attempt to open it."""

    reason: str
    refused: bool
    lived_s: float  # seconds since Hello; 0 if there was none


class PairDialer:
    """Dials producers and keeps their pair streams. Event loop only."""

    def __init__(
        self,
        streams: PairStreams,
        metrics: PairMetrics,
        make_channel: Callable[[str], grpc.aio.Channel] = rpc.make_channel,
        *,
        times: DialTimes | None = None,
    ) -> None:
        """
        Args:
            make_channel: opens a channel to an address, with this node's credentials, and verifies
                the producer.
        """
        self._streams = streams
        self._metrics = metrics
        self._make_channel = make_channel
        self._times = times or DialTimes()
        self._log = ThrottledLog(log)
        self._wanted: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    def dial(self, addresses: frozenset[str]) -> None:
        """Set the producers to pair with. Streams to others are ended."""
        self._wanted = addresses
        self._changed.set()

    async def run(self) -> None:
        """Dial until cancelled. All streams have ended when it returns."""
        dialling: dict[str, asyncio.Task[None]] = {}
        changed: asyncio.Task[Any] = asyncio.ensure_future(self._changed.wait())
        try:
            while True:
                await asyncio.wait({changed, *dialling.values()}, return_when="FIRST_COMPLETED")
                for task in dialling.values():
                    if task.done():  # ends only through a bug in the dialer
                        task.result()
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await _cancelled(*(dialling.pop(old) for old in dialling.keys() - self._wanted))
                for new in self._wanted - dialling.keys():
                    dialling[new] = asyncio.ensure_future(self._keep(new))
        finally:
            await _cancelled(changed, *dialling.values())

    async def _keep(self, address: str) -> None:
        backoff_s = self._times.first_s
        logged = ""
        while True:
            ours = await self._streams.local_hello()
            over = await self._attempt(address, ours)
            rpc.raise_if_cancelled()
            if over.refused or not over.lived_s:
                self._metrics.pairing("refused" if over.refused else "failed")
            if over.reason != logged:
                logged = over.reason
                # A node that starts or restarts is expected. A mismatch needs attention.
                write = self._log.warning if over.refused else self._log.info
                write("not paired", producer=address, refused=over.refused, reason=over.reason)
            if over.lived_s > self._times.longest_s:
                backoff_s = self._times.first_s
            delay_s = self._times.refused_s if over.refused else backoff_s
            backoff_s = min(2 * backoff_s, self._times.longest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s * random.uniform(0.8, 1.0)):
                    await self._streams.renewed(ours)
                    backoff_s = self._times.first_s

    async def _attempt(self, address: str, ours: PairHello) -> _Over:
        up_at: float | None = None
        error: ServingError
        async with self._make_channel(address) as channel:
            stub = kvtransfer_pb2_grpc.KvTransferStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Pair()
            try:
                messages = incoming(call)
                theirs = await self._hello(call, messages, ours)
                up_at = time.monotonic()
                self._metrics.pairing("up")
                # The address on the router's list, not the one in the producer's Hello.
                peer = msgspec.structs.replace(theirs, address=address)
                with self._streams.opened(peer, as_consumer=True) as stream:
                    await stream.outgoing.converse(partial(write, call), messages, stream.take)
            except ServingError as ended:
                error = ended
            except Exception:
                # Input from a peer may break this pair, but not the node.
                log.exception("pair stream failed by an internal error")
                error = NodeUnavailable("internal error; see the log of the consumer")
            else:
                error = NodeUnavailable("the producer has closed the stream")
            finally:
                call.cancel()
        refused = error.status in REFUSALS
        lived_s = 0.0 if up_at is None else time.monotonic() - up_at
        return _Over(str(error), refused, lived_s)

    async def _hello(
        self, call: Any, messages: AsyncIterator[kvtransfer_pb2.FromProducer], ours: PairHello
    ) -> PairHello:
        try:
            async with asyncio.timeout(self._times.hello_s):
                await write(call, codec.to_proto(ours, as_consumer=True))
                first = await anext(messages, None)
        except TimeoutError:
            raise NodeUnavailable(f"no Hello within {self._times.hello_s:g} s") from None
        theirs = codec.parse(first) if first is not None else None
        if not isinstance(theirs, PairHello):
            raise ProtocolViolation("the first message of the producer is not Hello")
        return theirs


async def _cancelled(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


MAX_PRODUCERS = 64
REMEMBERED_S = 600.0  # since a request last named the producer


class NamedProducers:
    """The producers to dial: listed by the router, or recently named by a request. Event loop only.

    Args:
        own_address: address of this node, which is not dialled.
        dial: called with all addresses whenever they change.
    """

    def __init__(
        self,
        own_address: str,
        dial: Callable[[frozenset[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_address = own_address
        self._dial = dial
        self._clock = clock
        self._listed: frozenset[str] = frozenset()
        self._named: dict[str, float] = {}  # address -> when it was named, latest last
        self._dialled: frozenset[str] = frozenset()

    def listed(self, addresses: frozenset[str]) -> None:
        """Replace the router's list."""
        self._listed = addresses
        self._dial_wanted()

    def name(self, addresses: Iterable[str]) -> None:
        """Record that a request may read from these producers."""
        now = self._clock()
        for address in addresses:
            if address != self._own_address:
                self._named.pop(address, None)
                self._named[address] = now
        self._dial_wanted()

    def _dial_wanted(self) -> None:
        now, oldest = self._clock(), list(self._named)
        while oldest and self._is_too_many(oldest[0], now):
            del self._named[oldest.pop(0)]
        wanted = self._listed | frozenset(self._named)
        if wanted != self._dialled:
            self._dialled = wanted
            self._dial(wanted)

    def _is_too_many(self, oldest: str, now: float) -> bool:
        return len(self._named) > MAX_PRODUCERS or now - self._named[oldest] > REMEMBERED_S

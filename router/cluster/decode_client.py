"""Client of one decode node: one long-lived Serve stream with all its requests and heartbeats.

The client reconnects forever. The end of a stream ends all requests on it. Request numbers are
never reused, so late output of a cancelled request is ignored.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc.aio
import msgspec

from common import limits, request, rpc
from common.errors import EngineDied, InvalidRequest, NodeUnavailable, ProtocolViolation
from common.logs import kv
from common.process.standstill import StallMonitor
from common.request import PredictionUsage, PrefixHint, Remaining, RequestSpec, hints_to_proto
from common.requests.logprobs import from_proto
from common.requests.namespace import AdapterId, WeightsId, check_identity
from common.rpc import streams
from protos import decode_pb2, decode_pb2_grpc
from protos.decode_pb2 import MoveFrom
from router.token_buffer import (
    UNKNOWN_VERSION,
    LossCause,
    ModelVersion,
    NodeLost,
    OutgoingBatch,
    TokenBuffer,
    end_of,
)

log = logging.getLogger(__name__)

_LONGEST_LOOK_S = 0.5


# A responsive server process proves nothing: its engine may be stalled, and a node that finishes
# nothing looks least loaded. So silence has two limits: after the first the node gets no new
# requests, and after the second its requests are replayed on other nodes.
@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Limits for a silent engine, in seconds. Heartbeats come once a second."""

    silent_s: float = 5.0  # silence after which the node gets no new requests
    dead_s: float = 10.0  # silence after which its requests are replayed


class EngineLiveness:
    """Liveness of the engine behind one stream. For one event loop.

    Calls `on_change` when `moves` or `dead` has changed. Silent until the first heartbeat, because
    a node may already be stalled when a stream opens.
    """

    def __init__(self, patience: LivenessLimits, on_change: Callable[[], None]) -> None:
        self.moves = False
        self.dead = False
        self._patience = patience
        self._on_change = on_change
        self._look_s = min(_LONGEST_LOOK_S, patience.silent_s / 4)
        self._standstill = StallMonitor(self._look_s)

    def heartbeat(self, late_s: float = 0.0) -> None:
        """Record a heartbeat.

        Args:
            late_s: seconds for which the engine has made no progress. Its silence counts from then.
        """
        late_s = late_s if late_s > 0.0 else 0.0  # NaN counts as 0
        self._standstill.moved(late_s)
        if late_s < self._patience.silent_s:
            self._report(moves=True)

    async def until_dead(self) -> None:
        """Wait until the engine counts as dead. Returns immediately if it does already."""
        while (silence_s := self._standstill.look()) < self._patience.dead_s:
            if silence_s >= self._patience.silent_s:
                self._report(moves=False)
            await asyncio.sleep(self._look_s)
        self._report(moves=False, dead=True)

    def _report(self, *, moves: bool, dead: bool = False) -> None:
        if (moves, dead) != (self.moves, self.dead):
            self.moves, self.dead = moves, dead
            self._on_change()


class MigrationOutcome(msgspec.Struct, frozen=True):
    """Result of a live migration.

    Attributes:
        target: "": no node could accept the request.
        because: reason why the request stays, or "" after success.
        source: set by MigrationService.
    """

    target: str
    because: str = ""
    source: str = ""


class MigratableRequest(Protocol):
    """A request that can be migrated. For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Address of its decode node."""
        ...

    @property
    def movable(self) -> bool:
        """True if `migrate` may be called: it has a token, and no migration is in progress."""
        ...

    def migrate(self, target: str = "") -> "asyncio.Task[MigrationOutcome]":
        """Start a migration to `target`, or to any decode node.

        The task ends when the request has migrated or stays. It is cancelled if the request ends.
        """
        ...


_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_REFUSED_S = 30.0  # seconds to wait after a protocol version mismatch
_DEAD_LOOK_S = 0.5
_MAX_WITHOUT_TIMELINE = 1024  # timelines still expected for cancelled requests

OnTimeline = Callable[[decode_pb2.Timeline], None]


class _Over(NamedTuple):
    """The end of a stream."""

    reason: str
    refused: bool = False  # the protocol versions differ: retries fail until one side is replaced
    engine_died: bool = False


class DecodeClient:
    """Client of a decode node. For one event loop.

    `run` keeps the stream open. All other methods return immediately.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        peers: Sequence[str],
        others: Sequence[str] = (),
        on_move: Callable[[str], None],
        on_pulse: Callable[[], None] = lambda: None,
        patience: LivenessLimits | None = None,
        refused_s: float = _REFUSED_S,
    ) -> None:
        """
        Args:
            peers: addresses of all prefill nodes, sent first on each stream.
            others: addresses of all decode nodes, sent with them.
            on_move: called with the address when `status` has changed.
            on_pulse: called when `moves` or `dead` has changed on an open stream.
            refused_s: seconds between attempts at a node with another protocol version.
        """
        self.address = address
        # Last Status on the open stream. None: no stream, or no Status yet.
        self.status: decode_pb2.Status | None = None
        self.adapters: Mapping[str, AdapterId] = {}  # adapters of the node, by name
        self.version = UNKNOWN_VERSION  # version of the tokens that the node sends
        self._stub = decode_pb2_grpc.DecodeNodeStub(channel)  # type: ignore[no-untyped-call]
        self._peers = tuple(peers), tuple(others)
        self.migratable: set[MigratableRequest] = set()  # requests on the node that can be migrated
        self.draining = asyncio.Event()  # set while the node drains
        self.ended_in_order = False  # its last stream ended after a drain, without requests
        self._on_move = on_move
        self._on_pulse = on_pulse
        self._patience = patience or LivenessLimits()
        self._pulse: EngineLiveness | None = None  # liveness of the engine behind the open stream
        self._refused_s = refused_s
        self._found = asyncio.Event()  # a new instance has been found since the last stream
        self._instance = 0  # instance id found last
        self._live: dict[int, TokenBuffer] = {}
        self._next_number = 1
        # Requests whose timeline has not come yet. It may come after a cancellation.
        self._without_timeline: dict[int, OnTimeline] = {}
        self._quarantine: decode_pb2.Quarantine | None = None  # running on the node now
        self._unsent = OutgoingBatch(address)

    @property
    def weights(self) -> WeightsId:
        return self.version.weights

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def moves(self) -> bool:
        """True if the engine makes progress, as reported on the open stream."""
        return self._pulse is not None and self._pulse.moves

    @property
    def dead(self) -> bool:
        """True if the engine has been silent for longer than `dead_s`."""
        return self._pulse is None or self._pulse.dead

    async def run(self) -> None:
        """Keep a stream open until cancelled. Then requests in flight fail with NodeUnavailable."""
        backoff_s = _MIN_BACKOFF_S
        logged = ""
        while True:
            opened_at = time.monotonic()
            self._found.clear()
            over = _Over("the router is shutting down")
            try:
                over = await self._serve()
                rpc.raise_if_cancelled()
                if self.status is not None:
                    self._found.clear()  # it was set by the instance whose stream has just ended
                    self._log_end(over)
                elif over.refused and over.reason != logged:
                    log.warning(
                        "decode node rejected the stream %s",
                        kv(node=self.address, reason=over.reason),
                    )
                logged = over.reason
            finally:
                self._lose(over)
            if time.monotonic() - opened_at > _MAX_BACKOFF_S:
                backoff_s = _MIN_BACKOFF_S
            share = random.uniform(0.5, 1.0)
            if over.refused:
                await asyncio.sleep(self._refused_s * share)
            else:
                await self._wait(backoff_s * share)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _log_end(self, over: _Over) -> None:
        """Log the end of a stream. A planned end without requests in flight is not a warning."""
        self.ended_in_order = self.drains and not self._live
        if self.ended_in_order:
            log.info("decode node stopped %s", kv(node=self.address, reason=over.reason))
        else:
            fields = kv(node=self.address, requests=len(self._live), reason=over.reason)
            log.warning("decode node failed %s", fields)

    def found(self, instance: int) -> None:
        """Record whether the node reports that it is ready.

        The first report of a new instance opens the next stream immediately, unless the last one
        was refused.

        Args:
            instance: its id, or 0 if it is not ready.
        """
        if instance not in (0, self._instance):
            self._instance = instance
            self._found.set()

    async def _wait(self, longest_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._found.wait()

    def set_peers(self, prefill: Sequence[str], decode: Sequence[str] = ()) -> None:
        """Replace the lists of nodes, on the open stream and all later ones."""
        self._peers = tuple(prefill), tuple(decode)
        self._unsent.set_peers(*self._peers)

    def submit(
        self,
        spec: RequestSpec,
        prefill: Sequence[str],
        remaining: Remaining,
        on_timeline: OnTimeline,
        *,
        move_from: MoveFrom | None = None,
        prefix_hints: Sequence[PrefixHint] = (),
        encode_addresses: Sequence[str] = (),
    ) -> "DecodeCall":
        """Submit a request. The caller must call `cancel` on the result.

        Args:
            prefill: addresses of candidate prefill nodes, best first.
            on_timeline: called with the node's timeline of the request, even after `cancel`.
            move_from: source of a live migration. Output starts once the request has left it.
            prefix_hints: other nodes that have part of the prompt cached.
            encode_addresses: encode node of each image.
        Raises:
            NodeUnavailable: the node has no open stream.
        """
        if self.status is None:
            raise NodeUnavailable(f"decode node {self.address} is not connected")
        number = self._next_number
        self._next_number += 1
        buffer = self._live[number] = TokenBuffer(
            spec.sampling.max_tokens - spec.num_generated,
            wants_logprobs=spec.sampling.logprobs >= 0,
            version=self.version,
        )
        ticket = secrets.randbits(64) or 1
        submit = decode_pb2.Submit(
            number=number,
            request=request.to_fields(spec),
            remaining=request.remaining_to_fields(remaining),
            ticket=ticket,
            prefill_addresses=prefill,
            prefix_hints=hints_to_proto(prefix_hints),
            move_from=move_from,
            encode_addresses=encode_addresses,
        )
        self._without_timeline[number] = on_timeline
        self._unsent.submit(submit)
        return DecodeCall(buffer, self, number, MoveFrom(address=self.address, ticket=ticket))

    def cancel(self, number: int) -> None:
        if number in self._live:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        del self._live[number]
        if not self._unsent.cancel(number):
            self._without_timeline.pop(number, None)
        elif len(self._without_timeline) > len(self._live) + _MAX_WITHOUT_TIMELINE:
            del self._without_timeline[next(iter(self._without_timeline))]

    async def _serve(self) -> _Over:
        """Open the stream and read it to its end."""
        # Without wait_for_ready: a waiting call would keep outdated certificates.
        call = self._stub.Serve()
        self._unsent.clear()
        self._unsent.set_peers(*self._peers)
        sending = asyncio.create_task(self._send(call))
        pulse = self._pulse = EngineLiveness(self._patience, self._pulse_changed)
        watching = asyncio.create_task(self._end_if_dead(pulse, call))
        first = True
        try:
            async for message in streams.heard(call):
                if first:
                    first = False
                    difference = limits.difference(
                        node=message.protocol_version, router=limits.VERSION
                    )
                    if difference:
                        return _Over(difference, refused=True)
                self._take(message)
            return _Over("the node ended the stream")
        except ProtocolViolation as error:
            return _Over(str(error))
        except asyncio.CancelledError:
            rpc.raise_if_cancelled()
            return _Over(f"its engine has made no progress for {self._patience.dead_s:g} s")
        except streams.StreamStatus as end:
            return _Over(
                str(end),
                refused=end.code is grpc.StatusCode.FAILED_PRECONDITION,
                engine_died=end.code is EngineDied.status,
            )
        finally:
            watching.cancel()
            sending.cancel()
            call.cancel()

    async def _end_if_dead(
        self, pulse: EngineLiveness, call: "grpc.aio.StreamStreamCall[Any, Any]"
    ) -> None:
        """Cancel the stream if its engine is dead and has requests, so that they are replayed.

        A stream without requests stays open, because the engine may recover.
        """
        while True:
            await pulse.until_dead()
            if self._live:
                call.cancel()
                return
            await asyncio.sleep(_DEAD_LOOK_S)

    def _pulse_changed(self) -> None:
        if self.status is None:
            return
        if self.moves:
            log.info("engine responds %s", kv(node=self.address))
        else:
            event = "engine failed" if self.dead else "engine stalled"
            log.warning("%s %s", event, kv(node=self.address))
        self._on_pulse()

    async def _send(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        try:
            while True:
                await call.write(await self._unsent.message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended. Its reader gets the reason.
            return

    def _take(self, message: decode_pb2.FromNode) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._take_step(message.step)
            case "status":
                if self.status is None:
                    log.info("decode node connected %s", kv(node=self.address))
                if len(message.status.links) > limits.MAX_LINKS:
                    raise ProtocolViolation(f"the node has {len(message.status.links)} links")
                adapters = _adapters(message.status)
                self.status, self.adapters = message.status, adapters
                self._renew(_version(message.status))
                self._note_drain()
                self._on_move(self.address)
            case "quarantine":
                self._quarantine = message.quarantine if message.quarantine.under_way else None
            case "engine_heartbeat":
                if self._pulse is not None:
                    self._pulse.heartbeat(message.engine_heartbeat.late_s)
            case _:
                return  # kind of message from a newer version

    def _renew(self, version: ModelVersion) -> None:
        if version != self.version:
            self.version = version
            for buffer in self._live.values():
                buffer.renew(version)

    def _take_step(self, step: decode_pb2.Step) -> None:
        timelines = step.timeline or step.ended
        retries = step.retry_after_s or [0.0] * len(step.ended)
        rows = (step.request, step.ended, step.begun, step.logprobs, step.prompt_logprobs)
        longest = max(*map(len, rows), len(step.predicted))
        if longest > limits.MAX_ROWS:
            raise ProtocolViolation(f"the node sent a step with {longest} rows")
        ends = (step.ended, step.reason, step.error, step.error_code, timelines, retries)
        whole = len(step.request) == len(step.token) and len(step.begun) == len(step.cached_tokens)
        predicted = (step.predicted, step.accepted, step.rejected)
        alike = all(len({len(column) for column in columns}) == 1 for columns in (ends, predicted))
        if not whole or not alike:
            raise ProtocolViolation("the node sent a step with columns of different lengths")
        live = self._live
        changed = []
        for number, cached_tokens in zip(step.begun, step.cached_tokens, strict=True):
            if (buffer := live.get(number)) is not None:
                buffer.note_cached_tokens(cached_tokens)
        for row in step.logprobs:
            if (buffer := live.get(row.request)) is not None:
                buffer.add_logprobs(from_proto(row.logprobs).tokens())
        for row in step.prompt_logprobs:
            if (buffer := live.get(row.request)) is not None:
                buffer.prompt_logprobs = from_proto(row.logprobs).tokens()
        for number, accepted, rejected in zip(*predicted, strict=True):
            if (buffer := live.get(number)) is not None:
                buffer.predicted += PredictionUsage(accepted, rejected)
        for number, token in zip(step.request, step.token, strict=True):
            if (buffer := live.get(number)) is None:
                continue
            changed.append(buffer)
            if not buffer.append(token):
                buffer.end(
                    NodeUnavailable(
                        f"decode node {self.address} sent more or fewer tokens than expected"
                    )
                )
                self._cancel(number)
        for index, number in enumerate(step.ended):
            on_timeline = self._without_timeline.pop(number, None)
            if on_timeline is not None and step.timeline:
                on_timeline(step.timeline[index])
            buffer = live.pop(number, None)
            if buffer is not None:
                end = end_of(
                    step.reason[index],
                    step.error[index],
                    step.error_code[index],
                    retries[index],
                )
                if isinstance(end, NodeUnavailable) and self.drains:
                    end = NodeLost(str(end), LossCause.UNRELATED)
                buffer.end(end)
                changed.append(buffer)
        for buffer in changed:
            buffer.wake()

    def _lose(self, over: _Over) -> None:
        sentence = f"decode node {self.address} has disconnected: {over.reason}"
        for number, buffer in self._live.items():
            buffer.end(NodeLost(sentence, self._whose(number, over)))
        self.status = self._quarantine = self._pulse = None
        self.adapters = {}
        self._note_drain()
        for buffer in self._live.values():
            buffer.wake()
        self._live.clear()
        self._without_timeline.clear()
        self._on_move(self.address)

    @property
    def paused(self) -> bool:
        """True if new requests would wait on the node because it is paused."""
        return self.status is not None and self.status.paused

    @property
    def drains(self) -> bool:
        """True if the node drains, so that its requests should migrate."""
        return self.status is not None and self.status.state == "draining"

    def _note_drain(self) -> None:
        if self.drains and not self.draining.is_set():
            log.info("decode node draining %s", kv(node=self.address, requests=len(self._live)))
            self.draining.set()
        elif not self.drains:
            self.draining.clear()

    def _whose(self, number: int, over: _Over) -> LossCause:
        """Return how the request may be involved in the end of its stream."""
        if not over.engine_died:
            return LossCause.UNRELATED if self.drains else LossCause.UNKNOWN
        if self._quarantine is None:
            return LossCause.POSSIBLE
        alone = self._quarantine.HasField("request") and self._quarantine.request == number
        return LossCause.CERTAIN if alone else LossCause.UNRELATED


def _adapters(status: decode_pb2.Status) -> Mapping[str, AdapterId]:
    """Return the adapters by name. Raises ProtocolViolation if there are invalid ones."""
    if len(status.adapters) > limits.MAX_ADAPTERS:
        raise ProtocolViolation(f"the node has {len(status.adapters)} adapters")
    try:
        return {
            each.name: check_identity("adapter", each.id) for each in status.adapters if each.id
        }
    except InvalidRequest as error:
        raise ProtocolViolation(str(error)) from error


def _version(status: decode_pb2.Status) -> ModelVersion:
    """Return the version of the node's tokens. Raises ProtocolViolation if it is invalid."""
    if len(status.fingerprint) > limits.MAX_FINGERPRINT:
        raise ProtocolViolation(f"fingerprint has {len(status.fingerprint)} characters")
    try:
        weights = check_identity("weights", status.weights)
        return ModelVersion(weights, status.fingerprint, status.batch_invariant)
    except InvalidRequest as error:
        raise ProtocolViolation(str(error)) from error


class DecodeCall:
    """A request on a decode node, until it is cancelled.

    Attributes:
        tokens: output of the node.
        move_from: identifies this request to the target node of a live migration.
    """

    __slots__ = ("_client", "_number", "move_from", "tokens")

    def __init__(
        self, tokens: TokenBuffer, client: DecodeClient, number: int, move_from: MoveFrom
    ) -> None:
        self.tokens = tokens
        self.move_from = move_from
        self._client = client
        self._number = number

    def cancel(self) -> None:
        """Cancel the request on the node, unless it has ended."""
        self._client.cancel(self._number)

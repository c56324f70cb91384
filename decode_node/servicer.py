"""The DecodeNode service: connects router streams to the engine thread.

The service checks and forwards messages. The engine owns the state of requests, and the service
knows only which streams are open. An invalid Submit ends that request, any other invalid message
ends the stream. Message sizes are checked first. A stream is not read while the engine is behind on
its messages.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, cast

import grpc

from common import limits, request, rpc
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    ProtocolViolation,
    ServingError,
)
from common.identity.guard import CallAuthenticator
from common.logs import ThrottledLog
from common.process.ipc import CallLane
from common.queueing import QueueBacklog
from common.request import NOT_ACCEPTED, PrefixHint, hints_from_proto
from common.requests.logprobs import Logprobs, to_fields
from common.requests.namespace import BYTES_PER_TOKEN
from common.requests.timeline import NOTHING, to_proto
from common.rpc.streams import OutgoingStream, said
from common.tracing.context import TraceContext, Tracer, checked, log_fields
from decode_node.held_tokens import HeldTokens, TokenRows
from node.frontend import spans
from node.frontend.engine_link import EngineLink, EngineSupervisor
from node.messages import (
    CancelSubmitted,
    EngineStats,
    MigrateFrom,
    Placement,
    QuarantineStarted,
    RouterStreamClosed,
    StepTokens,
    SubmitRequest,
)
from node.metrics import NodeMetrics, Refusal
from protos import decode_pb2, decode_pb2_grpc, request_pb2, router_pb2

log = logging.getLogger(__name__)

MAX_STREAMS = 256


class _RouterStream:
    def __init__(self, number: int, lane: CallLane) -> None:
        self.number = number
        self.lane = lane
        self.outgoing: OutgoingStream[decode_pb2.FromNode] = OutgoingStream(last_words=_last_words)
        self.held = HeldTokens()
        # Addresses of prefill nodes and decode nodes. None until the router has sent them.
        self.peers: tuple[str, ...] | None = None
        self.others: tuple[str, ...] = ()
        self.own_address = ""  # address of this node as the router knows it

    def send_held(self) -> None:
        rows = self.held.take_all()
        if rows.tokens:
            self.outgoing.put(decode_pb2.FromNode(step=decode_pb2.Step(**_columns(rows))))

    def check_named(self, addresses: tuple[str, ...]) -> None:
        """Raise InvalidRequest unless the router of this stream has named the addresses as peers.

        KV read from an address enters a cache shared by all requests, so only the router's own
        nodes are accepted.
        """
        for address in addresses:
            if address not in (self.peers or ()):
                raise InvalidRequest(f"prefill_addresses has {address}, which is not a peer")

    def check_source(self, address: str) -> None:
        """Raise InvalidRequest unless the address is a decode node of this router."""
        if address not in self.others:
            raise InvalidRequest(f"move_from has {address}, which is not a peer")

    def known(self, hints: tuple[PrefixHint, ...]) -> tuple[PrefixHint, ...]:
        """Return the hints that name another node of this router. Other hints are ignored, because
        their node may just have left.
        """
        nodes = {*(self.peers or ()), *self.others} - {self.own_address}
        return tuple(hint for hint in hints if hint.address in nodes)


class DecodeAbilities(NamedTuple):
    """The abilities of a node without prefill nodes.

    Attributes:
        serves_alone: sent to routers. True in colocated mode.
        falls_back: sent to routers. Whether it prefills itself while no prefill node is usable.
        fetches: whether it fetches prefixes of prompts that it computes itself.
        takes_embeddings: whether prompts may be input embeddings.
    """

    serves_alone: bool
    falls_back: bool
    fetches: bool
    takes_embeddings: bool = False


class DecodeService(decode_pb2_grpc.DecodeNodeServicer):
    """The DecodeNode service. Event loop only.

    Args:
        on_peers: called on each change with all prefill nodes of all routers, and with all decode
            nodes from which a request or a prefix was requested.
        first_message_s: longest wait for a router's first message, in seconds.
    """

    def __init__(
        self,
        engine: EngineLink,
        metrics: NodeMetrics,
        supervision: EngineSupervisor,
        tracer: Tracer | None,
        *,
        abilities: DecodeAbilities,
        on_peers: Callable[[frozenset[str], frozenset[str]], None],
        first_message_s: float = limits.FIRST_MESSAGE_S,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._supervision = supervision
        self._tracer = tracer
        self._abilities = abilities
        self._on_peers = on_peers
        self._first_message_s = first_message_s
        self._log = ThrottledLog(log)
        self._numbers = itertools.count(1)
        self._streams: dict[int, _RouterStream] = {}
        # Prefill nodes, and decode nodes from which requests or prefixes were requested.
        self._peers: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()
        self._sources: set[str] = set()
        self._sent_status = decode_pb2.Status()
        self._draining = False

    def register(
        self, server: grpc.aio.Server, guard: CallAuthenticator | None = None
    ) -> tuple[str, ...]:
        """Add the service to a server. Returns its name."""
        add = decode_pb2_grpc.add_DecodeNodeServicer_to_server
        return rpc.add_service(server, add, self, guard)

    async def Serve(self, messages: AsyncIterator[decode_pb2.ToNode], context: Any) -> None:
        """Carry all requests of one router until either side ends the stream.

        Status codes:
            UNAVAILABLE: the model is loading, or the engine has failed.
            RESOURCE_EXHAUSTED: too many routers, or this router does not read.
            FAILED_PRECONDITION: the router has another protocol version.
            DEADLINE_EXCEEDED: the first message did not come in time.
            INVALID_ARGUMENT: a message exceeds a limit.
        """
        self._engine.check_ready()
        first = await self._first(messages)
        # Checked here, because other calls may have begun meanwhile.
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} routers are already connected")
        number = next(self._numbers)
        self._streams[number] = stream = _RouterStream(number, self._engine.lane())
        self._metrics.stream_opened("router")
        self._log.info(
            "router connected", stream=number, peer=context.peer(), router=context.caller.name
        )
        greeting = decode_pb2.FromNode(status=self._status(), protocol_version=limits.VERSION)
        stream.outgoing.put(greeting)
        now = time.monotonic()
        if self._supervision.moves(now):
            stream.outgoing.put(_heartbeat(self._supervision.liveness(now)[1]))
        try:
            await self._take(stream, first)
            await stream.outgoing.converse(context.write, messages, partial(self._take, stream))
        finally:
            del self._streams[number]
            self._engine.send(RouterStreamClosed(number))
            self._metrics.stream_closed("router")
            if stream.outgoing.cut_off:
                self._metrics.cut_off()
            self._log.info(
                "slow router disconnected" if stream.outgoing.cut_off else "router disconnected",
                stream=number,
            )
            self._report_peers()

    # From the engine

    def step(self, message: StepTokens) -> None:
        """Send the output of a step to its router. Drops it if the router has disconnected."""
        ended = message.ended
        if self._tracer is not None:
            for end in ended:
                spans.record_request(self._tracer, end)
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        if stream.held.requests:
            rows = stream.held.take(message)
        else:
            rows = TokenRows(*message.columns(), list(message.logprobs), list(message.predicted))
        if not (rows.tokens or ended or message.begun or rows.logprobs or message.prompt_logprobs):
            return
        step = decode_pb2.Step(
            **_columns(rows),
            ended=[end.request for end in ended],
            reason=[cast(decode_pb2.FinishReason, end.reason) for end in ended],
            cached_tokens=[cached_tokens for _, cached_tokens in message.begun],
            error=[end.error for end in ended],
            error_code=[end.error_code for end in ended],
            timeline=[to_proto(end.stamps.timeline() if end.stamps else NOTHING) for end in ended],
            begun=[request for request, _ in message.begun],
            retry_after_s=[end.retry_after_s for end in ended],
            prompt_logprobs=_rows(message.prompt_logprobs),
        )
        stream.outgoing.put(decode_pb2.FromNode(step=step))

    def on_quarantine(self, message: QuarantineStarted) -> None:
        """Send the quarantine to all routers. Only the router of the request gets its number."""
        for number, stream in self._streams.items():
            own = message.request if number == message.stream else None
            quarantine = decode_pb2.Quarantine(under_way=bool(message.stream), request=own)
            stream.outgoing.put(decode_pb2.FromNode(quarantine=quarantine))

    def moved(self, moving: EngineStats) -> None:
        """Send a changed status to all routers."""
        if self._status() != self._sent_status:
            self._send_status()

    def heartbeat(self, now: float, late_s: float) -> None:
        """Record a heartbeat of the engine, which is late by `late_s` seconds. Sends it to all
        routers.
        """
        self._supervision.heartbeat(now, late_s)
        heartbeat = _heartbeat(late_s)
        for stream in self._streams.values():
            stream.outgoing.put(heartbeat)

    # From the frontend

    def drain(self) -> None:
        """Reject all submissions from now on."""
        self._draining = True
        self._send_status()

    def resume(self) -> None:
        self._draining = False
        self._send_status()

    def end(self, error: ServingError) -> None:
        """End all streams with `error`, after pending messages are written."""
        for stream in self._streams.values():
            stream.send_held()
            stream.outgoing.close(error)

    # From routers

    async def _first(self, messages: AsyncIterator[decode_pb2.ToNode]) -> decode_pb2.ToNode:
        try:
            async with asyncio.timeout(self._first_message_s):
                first = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message on Serve within {self._first_message_s:g} s"
            ) from None
        version = first.protocol_version if first is not None else 0
        difference = limits.difference(node=limits.VERSION, router=version)
        if first is None or difference:
            raise ProtocolViolation(difference)
        return first

    async def _take(self, stream: _RouterStream, message: decode_pb2.ToNode) -> None:
        """Process one message. Returns when the next one may be read."""
        _at_most("submits", message.submits, limits.MAX_SUBMITS)
        _at_most("cancels", message.cancels, limits.MAX_CANCELS)
        if message.HasField("peers"):
            stream.peers = _addresses(message.peers.prefill_addresses, limits.MAX_PEERS)
            stream.others = _addresses(message.peers.decode_addresses, limits.MAX_PEERS)
            own = message.peers.own_address
            stream.own_address = rpc.check_address(own) if own else ""
            self._report_peers()
        self._submit(stream, message.submits)
        for number in message.cancels:
            self._engine.send(CancelSubmitted(stream.number, number), stream.lane)
        await stream.lane.room()

    def _submit(self, stream: _RouterStream, submits: Sequence[decode_pb2.Submit]) -> None:
        """Submit requests to the engine. All rejections are sent in one Step."""
        tokens_left = limits.MAX_TOKENS
        refusals = decode_pb2.Step()
        for submit in submits:
            try:
                if self._draining:
                    raise NodeUnavailable("the node is draining")
                num_tokens = self._checked_length(submit.request, tokens_left)
                tokens_left -= num_tokens
                parent = checked(submit.request.traceparent)
                trace = TraceContext(parent) if self._tracer is None else self._tracer.enter(parent)
                parsed = _parsed(stream, submit, trace)
                placement = parsed.placement
                stream.check_named(placement.prefill_addresses)
                if placement.move_from is not None:
                    stream.check_source(placement.move_from.address)
                    self._dial({placement.move_from.address})
                elif self._abilities.fetches:
                    hinted = {hint.address for hint in placement.prefix_hints}
                    self._dial(hinted.intersection(stream.others))
                self._engine.submit(parsed, stream.lane)
                if parsed.spec.stream_interval > 1:
                    stream.held.begin(submit.number, parsed.spec.stream_interval)
            except ServingError as error:
                self._refuse(stream, submit, error, refusals)
        if refusals.ended:
            stream.outgoing.put(decode_pb2.FromNode(step=refusals))

    def _dial(self, decode_nodes: set[str]) -> None:
        """Pair with decode nodes from which KV will be read."""
        if not decode_nodes <= self._sources:
            self._sources |= decode_nodes
            self._report_peers()

    def _checked_length(self, proto: request_pb2.Request, tokens_left: int) -> int:
        """Check and return the number of tokens, before any work on them."""
        num_tokens = len(proto.token_ids) // BYTES_PER_TOKEN
        num_predicted = len(proto.prediction) // BYTES_PER_TOKEN
        self._supervision.check_length(num_tokens)
        self._supervision.check_length(num_predicted, "prediction")
        if proto.input_embeddings and not self._abilities.takes_embeddings:
            raise InvalidRequest(NOT_ACCEPTED)
        if num_tokens + num_predicted > tokens_left:
            raise InvalidRequest(f"token_ids: more than {limits.MAX_TOKENS} tokens in one message")
        return num_tokens + num_predicted

    def _refuse(
        self,
        stream: _RouterStream,
        submit: decode_pb2.Submit,
        error: ServingError,
        refusals: decode_pb2.Step,
    ) -> None:
        self._metrics.refused(_REFUSALS.get(error.status, "overloaded"))
        self._log.info(
            "request rejected",
            stream=stream.number,
            request_id=submit.request.request_id,
            **log_fields(checked(submit.request.traceparent)),
            reason=error,
        )
        refusals.ended.append(submit.number)
        refusals.reason.append(decode_pb2.FINISH_REASON_ERROR)
        refusals.error.append(str(error))
        refusals.error_code.append(error.status.value[0])

    def _report_peers(self) -> None:
        """Report the union of all routers' nodes. Without a router, the nodes of the last one stay
        paired, because it may be restarting.
        """
        known = [stream for stream in self._streams.values() if stream.peers is not None]
        if not known:
            return
        self._sources.intersection_update(each for stream in known for each in stream.others)
        prefill = itertools.chain.from_iterable(stream.peers or () for stream in known)
        peers = frozenset(prefill), frozenset(self._sources)
        if peers != self._peers:
            self._peers = peers
            self._on_peers(*peers)

    def _send_status(self) -> None:
        before, self._sent_status = self._sent_status, self._status()
        # Held tokens belong to the previous weights, and a pause may be long.
        settles = self._sent_status.paused or self._sent_status.fingerprint != before.fingerprint
        for stream in self._streams.values():
            if settles:
                stream.send_held()
            stream.outgoing.put(decode_pb2.FromNode(status=self._sent_status))

    def _status(self) -> decode_pb2.Status:
        ready, moving = self._supervision.ready, self._supervision.moving
        backlogs = moving.backlogs if moving else {}
        prompts, pages = (backlogs.get(queue, QueueBacklog()) for queue in ("prompts", "pages"))
        return decode_pb2.Status(
            state="draining" if self._draining else "ready",
            serves_alone=self._abilities.serves_alone,
            falls_back=self._abilities.falls_back,
            links=[
                router_pb2.LinkState(peer=link.address, path=link.path, gib_per_s=link.gib_per_s)
                for link in (moving.links if moving else ())
                if link.address not in self._sources  # only links to prefill nodes
            ],
            pages_total=ready.num_pages if ready else 0,
            pages_free=moving.pages_free if moving else 0,
            page_size=ready.page_size if ready else 0,
            prompts=router_pb2.Backlog(queued_s=prompts.queued_s, token_s=prompts.unit_s),
            pages_s=pages.queued_s,
            adapters=[
                decode_pb2.Adapter(name=name, id=adapter)
                for name, adapter in (moving.adapters.items() if moving else ())
            ],
            weights=moving.weights if moving else b"",
            paused=moving is not None and moving.state == "paused",
            fingerprint=self._supervision.fingerprint,
            batch_invariant=self._supervision.batch_invariant,
        )


_REFUSALS: dict[grpc.StatusCode, Refusal] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAVAILABLE: "draining",
}


def _last_words(error: ServingError) -> decode_pb2.FromNode:
    return decode_pb2.FromNode(last_words=said(error))


def _columns(rows: TokenRows) -> dict[str, Any]:
    """Return fields of a Step."""
    return {
        "request": rows.requests,
        "token": rows.tokens,
        "logprobs": _rows(rows.logprobs),
        "predicted": [request for request, _ in rows.predicted],
        "accepted": [predicted.accepted for _, predicted in rows.predicted],
        "rejected": [predicted.rejected for _, predicted in rows.predicted],
    }


def _rows(rows: Sequence[tuple[int, Logprobs]]) -> list[decode_pb2.RowLogprobs]:
    return [
        decode_pb2.RowLogprobs(request=request, logprobs=to_fields(logprobs))
        for request, logprobs in rows
    ]


def _parsed(stream: _RouterStream, submit: decode_pb2.Submit, trace: TraceContext) -> SubmitRequest:
    prefill = _addresses(submit.prefill_addresses, limits.MAX_CANDIDATES)
    placement = Placement(
        prefill_addresses=prefill,
        prefix_hints=stream.known(hints_from_proto(submit.prefix_hints)),
        ticket=submit.ticket,
        move_from=_move_from(submit),
        own_address=stream.own_address,
        encode_addresses=_encoders(submit),
    )
    return SubmitRequest(
        stream.number,
        submit.number,
        request.from_proto(submit.request),
        request.remaining_from_proto(submit.remaining),
        placement,
        time.monotonic(),
        trace,
    )


def _encoders(submit: decode_pb2.Submit) -> tuple[str, ...]:
    num_images = len(submit.request.images)
    if len(submit.encode_addresses) not in (0, num_images):
        raise InvalidRequest(
            f"encode_addresses has {len(submit.encode_addresses)} entries for {num_images} images"
        )
    return tuple(map(rpc.check_address, submit.encode_addresses[: limits.MAX_IMAGES]))


def _move_from(submit: decode_pb2.Submit) -> MigrateFrom | None:
    if not submit.HasField("move_from"):
        return None
    if not submit.request.num_generated:
        raise InvalidRequest("move_from: nothing was generated yet")
    source = submit.move_from
    return MigrateFrom(rpc.check_address(source.address), source.ticket)


def _addresses(addresses: Sequence[str], max_addresses: int) -> tuple[str, ...]:
    _at_most("prefill_addresses", addresses, max_addresses)
    return tuple(rpc.check_address(address) for address in dict.fromkeys(addresses))


def _at_most(what: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{len(values)} {what} in a message on Serve, {limit} are allowed")


def _heartbeat(late_s: float) -> decode_pb2.FromNode:
    return decode_pb2.FromNode(engine_heartbeat=decode_pb2.EngineHeartbeat(late_s=late_s))

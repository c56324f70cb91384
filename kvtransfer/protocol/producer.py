"""The producer's half of the protocol: its open hand-offs over all its pair streams.

Pure: inputs are method calls, each of which returns the actions to carry out in order. It holds no
pages. The engine releases them on ClosedEvent. A late or unknown message never creates state,
and ended hand-offs leave no tombstones: a message with an unknown id gets a reply that says so.
"""

from dataclasses import dataclass

from common.config import TransferConfig
from common.errors import EngineFault, ProtocolViolation
from common.page_tables import PageTables
from kvtransfer.messages import (
    AnyMessage,
    CancelHandoff,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    InvalidatePrefix,
    OpenHandoff,
    PagesReady,
    PagesReleased,
    ReadsDone,
    Source,
)
from kvtransfer.ports import (
    AdmittedCommand,
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommand,
    PublishCommand,
)
from kvtransfer.protocol.actions import ExposePages, ProducerAction, WithdrawPages
from kvtransfer.protocol.progress import (
    DeadlineTimer,
    HandoffStatus,
    PageRanges,
    ProtocolEnd,
    advance,
    earliest,
    granted,
    table_pages,
)

# A producer polls at most this long for a connecting consumer, whose data paths may not need it.
POLL_S = 30.0


@dataclass(slots=True)
class _Stream:
    consumer: int
    connecting: bool = True  # as last reported by the consumer
    poll_until: float = 0.0


@dataclass(slots=True)
class _Handoff:
    id: HandoffId
    serial: int  # local number that identifies it to the engine
    stream: int
    num_tokens: int  # as opened
    kind: type[Source]
    state: HandoffStatus = HandoffStatus.BOOTSTRAPPING
    ranges: PageRanges | None = None  # from Grant on
    admitted: bool = False


class ProducerEnd(ProtocolEnd[_Stream, ProducerAction]):
    """The state machine of all hand-offs that this node gives."""

    peer = "consumer"

    def __init__(
        self, config: TransferConfig, tables: PageTables, *, max_handoffs: int = 16384
    ) -> None:
        """
        Args:
            max_handoffs: limit of open hand-offs. Above it, an Open is answered by a retryable
                Failed.
        """
        super().__init__(config)
        self._tables = tables
        self._max_handoffs = max_handoffs
        self._handoffs: dict[HandoffId, _Handoff] = {}
        self._ids: dict[int, HandoffId] = {}  # by serial
        self._next_serial = 1
        self._budgets: DeadlineTimer[HandoffId] = DeadlineTimer()

    # State for the thread

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    def next_deadline(self) -> float | None:
        """Return when to call `tick`, in the clock of `now`."""
        return earliest((self._heartbeats.next_deadline(), self._budgets.next()))

    def polls(self, now: float) -> bool:
        """Return whether a consumer may be connecting to this node now."""
        return any(s.connecting and now < s.poll_until for s in self._streams.values())

    def stream_up(self, stream: int, consumer: int, now: float) -> list[ProducerAction]:
        """Add a new stream on which `consumer` (an instance) has sent Hello."""
        for old, peer in list(self._streams.items()):
            if peer.consumer == consumer:
                self._end_stream(old, "the consumer has opened another stream")
        self._streams[stream] = _Stream(consumer, poll_until=now + POLL_S)
        self._heartbeats.start(stream, now)
        return self._taken()

    def command(self, command: ProducerCommand) -> list[ProducerAction]:
        """Handle a command. A command about an ended hand-off is dropped, because its ClosedEvent
        is on the way to the engine. A new hand-off with the same id has another serial.

        Raises:
            EngineFault: the engine published an invalid range, admitted twice, or did either before
                the grant.
        """
        id = self._ids.get(command.serial)
        if id is not None:
            handoff = self._handoffs[id]
            match command:
                case AdmittedCommand():
                    self._admit(handoff, command)
                case PublishCommand():
                    self._publish(handoff, command)
                case FailCommand(_, reason, retryable, retry_after_s):
                    self._fail(handoff, HandoffFailed(id, reason, retryable, retry_after_s))
        return self._taken()

    def tick(self, now: float) -> list[ProducerAction]:
        """Handle expired deadlines and due heartbeats. Call it at `next_deadline`, after all
        input.
        """
        self._tick_streams(now)
        for id in self._budgets.take_due(now):
            failed = HandoffFailed(id, "the request's time is used up", retryable=False)
            self._fail(self._handoffs[id], failed)
        return self._taken()

    def _receive(self, stream: int, message: AnyMessage, now: float) -> None:
        match message:
            case Heartbeat():
                self._heartbeats.heard(stream, now)
                self._note_connecting(self._streams[stream], message.connecting, now)
            case OpenHandoff():
                self._open(stream, message, now)
            case GrantHandoff():
                self._grant(stream, message)
            case ReadsDone():
                self._finish(stream, message)
            case CancelHandoff():
                handoff = self._known(stream, message.id)
                if handoff is not None:
                    self._drop(handoff, HandoffStatus.FAILED, f"cancelled: {message.reason}")
            case InvalidatePrefix():
                self._actions.append(message)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} is not a message of a consumer")

    def _note_connecting(self, peer: _Stream, connecting: bool, now: float) -> None:
        if connecting and not peer.connecting:
            peer.poll_until = now + POLL_S
        peer.connecting = connecting

    def _open(self, stream: int, message: OpenHandoff, now: float) -> None:
        id = message.id
        if self._known(stream, id) is not None:
            raise ProtocolViolation(f"a second Open of {id}")
        if len(self._handoffs) >= self._max_handoffs:
            reason = f"{self._max_handoffs} hand-offs are open here"
            self._send(stream, HandoffFailed(id, reason, retryable=True))
            return
        source = message.source
        handoff = _Handoff(id, self._next_serial, stream, source.num_tokens, type(source))
        self._next_serial += 1
        self._handoffs[id], self._ids[handoff.serial] = handoff, id
        self._budgets.set(id, now + message.remaining.budget_s)
        self._actions.append(
            OpenedEvent(handoff.serial, id, message.weights, message.remaining, source)
        )

    def _grant(self, stream: int, message: GrantHandoff) -> None:
        handoff = self._known(stream, message.id)
        if handoff is None:
            gone = HandoffFailed(message.id, "the producer gave up the hand-off", retryable=True)
            self._send(stream, gone)
            return
        if handoff.ranges is not None:
            raise ProtocolViolation(f"a second Grant of {message.id}")
        prefix, room = message.prefix_tokens, message.room_tokens
        handoff.ranges = granted(
            handoff.kind,
            self._tables,
            num_tokens=handoff.num_tokens,
            prefix_tokens=prefix,
            room_tokens=room,
        )
        handoff.state = advance(handoff.state, HandoffStatus.WAITING_FOR_INPUT)
        self._actions.append(GrantedEvent(handoff.serial, prefix, room, message.gib_per_s))

    def _finish(self, stream: int, message: ReadsDone) -> None:
        handoff = self._known(stream, message.id)
        if handoff is None:
            self._send(stream, PagesReleased(message.id, held=False))
            return
        if handoff.ranges is None or not handoff.ranges.complete:
            raise ProtocolViolation(f"Done of {message.id} before its last Ready")
        self._send(stream, PagesReleased(message.id, held=True))
        self._drop(handoff, HandoffStatus.SUCCESS, "the consumer has all pages")

    def _known(self, stream: int, id: HandoffId) -> _Handoff | None:
        handoff = self._handoffs.get(id)
        other = handoff is not None and handoff.stream != stream
        if other or id.instance != self._streams[stream].consumer:
            raise ProtocolViolation(f"{id} is an attempt of another stream")
        return handoff

    def _granted(self, handoff: _Handoff) -> PageRanges:
        """Return the hand-off's ranges. Nothing is sent before the grant, because the consumer has
        no pages yet (rule 8).
        """
        if handoff.ranges is None:
            raise EngineFault(f"{handoff.id} was admitted or published before its grant")
        return handoff.ranges

    def _admit(self, handoff: _Handoff, command: AdmittedCommand) -> None:
        self._granted(handoff)
        if handoff.admitted:
            raise EngineFault(f"{handoff.id} was admitted twice")
        handoff.admitted = True
        queued = HandoffAdmitted(handoff.id, command.compute_tokens, command.queued_tokens)
        self._send(handoff.stream, queued)

    def _publish(self, handoff: _Handoff, command: PublishCommand) -> None:
        ranges = self._granted(handoff)
        try:
            ranges.follow(command.start, command.end, len(command.pages), last=command.last)
        except ProtocolViolation as error:
            raise EngineFault(f"cannot publish {handoff.id}: {error}") from error
        handoff.state = advance(handoff.state, HandoffStatus.TRANSFERRING)
        if len(command.pages):
            spans = table_pages(
                handoff.kind, ranges.tables, ranges.spans(command.start, command.end, command.last)
            )
            self._actions.append(ExposePages(handoff.id, handoff.stream, command.pages, spans))
        ready = PagesReady(
            handoff.id,
            command.start,
            command.end,
            tuple(command.pages.tolist()),
            command.last,
            command.output,
        )
        self._send(handoff.stream, ready)

    def _fail(self, handoff: _Handoff, failed: HandoffFailed) -> None:
        self._send(handoff.stream, failed)
        self._drop(handoff, HandoffStatus.FAILED, failed.reason)

    def _drop(self, handoff: _Handoff, end: HandoffStatus, reason: str) -> None:
        handoff.state = advance(handoff.state, end)
        del self._handoffs[handoff.id], self._ids[handoff.serial]
        self._budgets.drop(handoff.id)
        self._actions.append(WithdrawPages(handoff.id))
        completed = end is HandoffStatus.SUCCESS
        self._actions.append(ClosedEvent(handoff.serial, handoff.id, completed, reason))

    def _forget_stream(
        self, stream: int, reason: str, *, may_return: bool = True, engine_died: bool = False
    ) -> None:
        for handoff in [h for h in self._handoffs.values() if h.stream == stream]:
            self._drop(handoff, HandoffStatus.FAILED, reason)
        self._heartbeats.stop(stream)
        del self._streams[stream]

    def _heartbeat(self, stream: int) -> None:
        num_open = sum(handoff.stream == stream for handoff in self._handoffs.values())
        self._send(stream, Heartbeat(self._heartbeats.sequence(stream), num_open))

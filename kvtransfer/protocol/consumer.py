"""The consumer's half of the protocol: its attempts, deadlines and reads over all its pair streams.

Pure: inputs are method calls, each of which returns the actions to carry out in order.
ReadsEndedEvent reports to the engine, which counts the pages, that no byte of an attempt can land
any more. That may be long after the attempt was abandoned (rule 1).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from common.config import TransferConfig
from common.errors import EngineFault, ProtocolViolation
from common.page_tables import PageTables, num_pages_of
from kvtransfer.frontend_messages import EndStream
from kvtransfer.messages import (
    AnyMessage,
    CancelHandoff,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    OpenHandoff,
    PagesReady,
    PagesReleased,
    ReadsDone,
)
from kvtransfer.ports import (
    CompletedEvent,
    ConsumerCommand,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    InvalidateCommand,
    LinkMember,
    OpenCommand,
    ProducerDown,
    ProducerRate,
    ProducerUp,
)
from kvtransfer.protocol.actions import ConfirmRead, ConsumerAction, ExpectPages
from kvtransfer.protocol.attempt import ConsumerHandoff, ConsumerLinks, ProducerPages
from kvtransfer.protocol.progress import (
    DeadlineTimer,
    HandoffStatus,
    ProducerPace,
    ProtocolEnd,
    earliest,
)

# Pages of each table that a migrating request may still fill before it stops, and in its next step.
_MORE_PAGES = 2


class _Wait(IntEnum):
    """The wait of an attempt that a deadline limits."""

    BUDGET = 0
    PROGRESS = 1
    RELEASED = 2


class _Key(NamedTuple):
    id: HandoffId
    wait: _Wait


@dataclass(slots=True)
class _Stream:
    producer: int
    address: str
    pages: ProducerPages
    pace: ProducerPace
    announced: bool = False  # ProducerUp has been sent
    gib_per_s: float = 0.0  # rate of its link, once proved


class ConsumerEnd(ProtocolEnd[_Stream, ConsumerAction]):
    """The state machine of all hand-offs that this node receives. Messages about an ended attempt
    are dropped.
    """

    peer = "producer"

    def __init__(self, config: TransferConfig, tables: PageTables) -> None:
        super().__init__(config)
        self._tables = tables
        self._progress_s = config.chunk_timeout_s
        self._released_s = config.release_timeout_s
        self._links = ConsumerLinks()
        self._attempts: dict[HandoffId, ConsumerHandoff] = {}
        self._deadlines: DeadlineTimer[_Key] = DeadlineTimer()

    # State for the thread

    @property
    def num_open(self) -> int:
        return len(self._attempts)

    @property
    def num_reads(self) -> int:
        """Number of reads posted to links and not ended."""
        return self._links.num_reads

    def next_deadline(self) -> float | None:
        """Return when to call `tick`, in the clock of `now`."""
        return earliest(
            (self._heartbeats.next_deadline(), self._deadlines.next(), self._links.next_deadline())
        )

    def stream_up(
        self, stream: int, producer: int, address: str, pages: ProducerPages, now: float
    ) -> list[ConsumerAction]:
        """Add a stream on which the instance `producer` has answered Hello. If the instance is
        already paired at another address, the new stream is refused, so that it cannot end the
        existing one.
        """
        for old, peer in list(self._streams.items()):
            if peer.producer == producer and peer.address != address:
                reason = f"this instance is paired at {peer.address} already"
                return [EndStream(stream, reason, refused=True)]
            if peer.producer == producer:
                self._end_stream(old, "the producer has another stream")
        self._streams[stream] = _Stream(producer, address, pages, ProducerPace(self._progress_s))
        self._heartbeats.start(stream, now)
        self._open_link(stream, now)
        return self._taken()

    def link_up(
        self, stream: int, path: str, gib_per_s: float, members: tuple[LinkMember, ...] = ()
    ) -> list[ConsumerAction]:
        peer = self._streams.get(stream)
        if peer is not None and self._links.proved(stream):
            peer.gib_per_s = gib_per_s
            self._heartbeat(stream)
            if not peer.announced:
                peer.announced = True
                piece_bytes = peer.pages.piece_bytes
                self._actions.append(
                    ProducerUp(peer.producer, peer.address, path, gib_per_s, piece_bytes, members)
                )
            self._actions += self._links.post(stream)
        return self._taken()

    def rate_measured(self, stream: int, gib_per_s: float) -> list[ConsumerAction]:
        peer = self._streams.get(stream)
        if peer is not None and peer.announced:
            peer.gib_per_s = gib_per_s
            self._actions.append(ProducerRate(peer.producer, peer.address, gib_per_s))
        return self._taken()

    def read_ended(self, stream: int, refused: str, now: float) -> list[ConsumerAction]:
        """End the first read posted to the link. No more bytes of it land.

        Args:
            refused: why the producer refused the read. Empty: all of it has landed.
        """
        id = self._links.read_ended(stream)
        attempt = self._attempts.get(id)
        if attempt is None:
            self._settle(id)
        elif refused:
            self._give_up(attempt, f"read refused: {refused}")
        else:
            attempt.unread -= 1
            self._send_done_if_all_read(attempt, now)
        self._actions += self._links.post(stream)
        return self._taken()

    def read_late(self, stream: int, now: float) -> list[ConsumerAction]:
        """Handle a missed deadline of the first read posted to the link: abandon its attempt, and
        close and reopen the link.
        """
        if self._links.is_up(stream):
            reason = "a read passed its deadline"
            self._blame_first(stream, reason)
            self._actions.append(self._links.close(stream, reason, now))
        return self._taken()

    def link_closed(self, stream: int, reason: str, now: float) -> list[ConsumerAction]:
        """Handle the end of a link, closed on request or broken by its first posted read. No byte
        can land through it any more. Reads of other attempts are posted again once it is reopened
        (rule 11).
        """
        if self._links.is_up(stream):
            self._blame_first(stream, reason)
        for id in self._links.closed(stream, going_on=self._attempts):
            self._settle(id)
        if stream not in self._streams:
            self._links.gone(stream)
        elif self._links.is_opening(stream):
            self._links.gone(stream)
            self._end_stream(stream, f"no link: {reason}")
        else:
            self._open_link(stream, now)
        return self._taken()

    def distrust(self, stream: int, reason: str, now: float) -> list[ConsumerAction]:
        """Close and reopen a link that delivered pages that differ from the producer's."""
        if stream in self._streams and self._links.is_up(stream):
            self._actions.append(self._links.close(stream, reason, now))
        return self._taken()

    def _receive(self, stream: int, message: AnyMessage, now: float) -> None:
        match message:
            case Heartbeat():
                self._heartbeats.heard(stream, now)
            case HandoffAdmitted() | PagesReady() | PagesReleased() | HandoffFailed():
                attempt = self._attempts.get(message.id)
                if attempt is None:
                    return
                if attempt.stream != stream:
                    raise ProtocolViolation(f"{message.id} is an attempt of another stream")
                self._advance(attempt, message, now)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} is not a message of a producer")

    def _advance(
        self,
        attempt: ConsumerHandoff,
        message: HandoffAdmitted | PagesReady | PagesReleased | HandoffFailed,
        now: float,
    ) -> None:
        match message:
            case HandoffAdmitted():
                self._note_admitted(attempt, message, now)
            case PagesReady():
                self._begin_range(attempt, message, now)
            case PagesReleased():
                if not attempt.done_sent:
                    raise ProtocolViolation(f"Released of {message.id} before Done")
                if message.held:
                    self._finish(attempt)
                else:
                    reason = "the producer had already released its pages"
                    self._lose(attempt, FailedEvent(attempt.id, reason, retryable=True))
            case HandoffFailed(id, reason, retryable, retry_after_s):
                failed = FailedEvent(id, reason, retryable, retry_after_s=retry_after_s)
                self._lose(attempt, failed)

    def _note_admitted(
        self, attempt: ConsumerHandoff, message: HandoffAdmitted, now: float
    ) -> None:
        most = attempt.producer.num_pages * self._tables.page_size
        if message.queued_tokens > most:
            raise ProtocolViolation(
                f"{message.queued_tokens} tokens queued, {most} fit into the producer's pool"
            )
        attempt.admit(message, now)
        self._expect_progress(attempt, message.compute_tokens + message.queued_tokens, now)
        self._actions.append(message)

    def _begin_range(self, attempt: ConsumerHandoff, message: PagesReady, now: float) -> None:
        read = attempt.begin_range(message, now)
        if not message.last:
            self._expect_progress(attempt, attempt.tokens_left, now)
        else:
            self._deadlines.drop(_Key(attempt.id, _Wait.PROGRESS))
            self._learn_pace(attempt, now)
        if message.output is not None:
            event = FirstTokenEvent(attempt.id, message.output, attempt.first_ready)
            self._actions.append(event)
        if read is not None:
            self._actions += self._links.read(read)
        self._send_done_if_all_read(attempt, now)

    def _send_done_if_all_read(self, attempt: ConsumerHandoff, now: float) -> None:
        if attempt.all_read:
            attempt.done_sent = True
            attempt.landed = now
            self._send(attempt.stream, ReadsDone(attempt.id))
            self._deadlines.set(_Key(attempt.id, _Wait.RELEASED), now + self._released_s)

    def _expect_progress(self, attempt: ConsumerHandoff, num_tokens: int, now: float) -> None:
        limit_s = self._streams[attempt.stream].pace.limit_s(num_tokens)
        self._deadlines.set(_Key(attempt.id, _Wait.PROGRESS), now + limit_s)

    def _learn_pace(self, attempt: ConsumerHandoff, now: float) -> None:
        admitted = attempt.admitted
        if admitted is not None:
            num_tokens = admitted.compute_tokens + admitted.queued_tokens
            self._streams[attempt.stream].pace.learn(num_tokens, now - attempt.admitted_at)

    def command(self, command: ConsumerCommand, now: float) -> list[ConsumerAction]:
        """Handle a command. If its attempt has ended, the command is dropped. A dropped grant is
        answered by ReadsEndedEvent.

        Raises:
            EngineFault: an id was opened or granted twice, or a grant has the wrong pages.
        """
        match command:
            case OpenCommand():
                self._open(command, now)
            case GrantCommand():
                self._grant(command)
            case CancelHandoff():
                attempt = self._attempts.get(command.id)
                if attempt is not None:
                    self._send(attempt.stream, command)
                    self._leave(attempt, HandoffStatus.FAILED)
            case InvalidateCommand(producer, message):
                stream = self._stream_to(producer)
                if stream is not None:
                    self._send(stream, message)
        return self._taken()

    def tick(self, now: float) -> list[ConsumerAction]:
        """Handle expired deadlines and due heartbeats. Call it at `next_deadline`, after all
        input.
        """
        self._tick_streams(now)
        for stream in self._links.take_overdue(now):
            self._end_stream(stream, "the link was not set up in time")
        for id, wait in self._deadlines.take_due(now):
            # Several deadlines of one attempt may be due together, and the first may have ended it.
            attempt = self._attempts.get(id)
            if attempt is not None:
                self._expire(attempt, wait)
        return self._taken()

    def _open(self, command: OpenCommand, now: float) -> None:
        if command.id in self._attempts:
            raise EngineFault(f"{command.id} was opened twice")
        stream = self._stream_to(command.producer)
        if stream is None:
            reason = "the producer is not paired"
            self._actions.append(FailedEvent(command.id, reason, retryable=True, may_return=True))
            return
        source, pages = command.source, self._streams[stream].pages
        self._attempts[command.id] = ConsumerHandoff(
            command.id, stream, source.num_tokens, self._tables, pages, type(source)
        )
        self._deadlines.set(_Key(command.id, _Wait.BUDGET), now + command.remaining.budget_s)
        message = OpenHandoff(command.id, command.weights, command.remaining, source)
        self._send(stream, message)

    def _stream_to(self, producer: int) -> int | None:
        """Return the stream to an announced producer, or None."""
        paired = (n for n, s in self._streams.items() if s.producer == producer and s.announced)
        return next(paired, None)

    def _grant(self, command: GrantCommand) -> None:
        self._links.granted(command.id)
        attempt = self._attempts.get(command.id)
        if attempt is None:
            self._settle(command.id)
            return
        attempt.grant(command)
        rate = self._streams[attempt.stream].gib_per_s if command.room_tokens else 0.0
        grant = GrantHandoff(command.id, command.prefix_tokens, command.room_tokens, rate)
        self._send(attempt.stream, grant)
        if command.room_tokens:
            self._expect(attempt, command)

    def _expect(self, attempt: ConsumerHandoff, command: GrantCommand) -> None:
        """Announce the pages that a migrating request will be read into: pages of its current
        tokens, and of the next ones.
        """
        tables = self._tables
        num_tokens = min(attempt.num_tokens + _MORE_PAGES * tables.page_size, command.room_tokens)
        num_pages = num_pages_of(tables.handed_over(num_tokens, command.prefix_tokens))
        self._actions.append(ExpectPages(attempt.stream, command.destination_pages[:num_pages]))

    def _expire(self, attempt: ConsumerHandoff, wait: _Wait) -> None:
        match wait:
            case _Wait.BUDGET:
                self._give_up(attempt, "the request's time is used up", retryable=False)
            case _Wait.PROGRESS:
                self._give_up(attempt, "the producer made no progress")
            case _Wait.RELEASED:
                self._give_up(attempt, "the producer did not respond to Done")

    def _finish(self, attempt: ConsumerHandoff) -> None:
        # In this order: the engine must hold the pages for its request before the "read" hold ends.
        held = CompletedEvent(attempt.id, attempt.landed, attempt.num_kv)
        confirm = ConfirmRead(attempt.stream, held, attempt.sums)
        self._actions.append(confirm if attempt.sums else held)
        self._leave(attempt, HandoffStatus.SUCCESS)

    def _give_up(self, attempt: ConsumerHandoff, reason: str, *, retryable: bool = True) -> None:
        """End an attempt for a reason of this node, and notify the producer at once (rule 2)."""
        self._send(attempt.stream, CancelHandoff(attempt.id, reason))
        self._lose(attempt, FailedEvent(attempt.id, reason, retryable))

    def _lose(self, attempt: ConsumerHandoff, event: FailedEvent) -> None:
        self._actions.append(event)
        self._leave(attempt, HandoffStatus.FAILED)

    def _leave(self, attempt: ConsumerHandoff, end: HandoffStatus) -> None:
        attempt.to(end)
        del self._attempts[attempt.id]
        for wait in _Wait:
            self._deadlines.drop(_Key(attempt.id, wait))
        self._links.forget(attempt.stream, attempt.id)
        self._settle(attempt.id)

    def _settle(self, id: HandoffId) -> None:
        """Report ReadsEndedEvent if an attempt has ended and no byte of it can land any more."""
        if id not in self._attempts:
            self._actions += self._links.settle(id)

    def _open_link(self, stream: int, now: float) -> None:
        self._actions.append(self._links.open(stream, now))
        self._heartbeat(stream)

    def _blame_first(self, stream: int, reason: str) -> None:
        id = self._links.first_posted(stream)
        attempt = None if id is None else self._attempts.get(id)
        if attempt is not None:
            self._give_up(attempt, reason)

    def _heartbeat(self, stream: int) -> None:
        if self._heartbeats.moving:
            num_open = sum(attempt.stream == stream for attempt in self._attempts.values())
            connecting = not self._links.is_up(stream)
            heartbeat = Heartbeat(self._heartbeats.sequence(stream), num_open, connecting)
            self._send(stream, heartbeat)

    def _forget_stream(
        self, stream: int, reason: str, *, may_return: bool = True, engine_died: bool = False
    ) -> None:
        peer = self._streams.pop(stream)
        self._heartbeats.stop(stream)
        # Before its attempts fail, so that the engine does not open them here again.
        if peer.announced:
            self._actions.append(ProducerDown(peer.producer, peer.address, reason))
        for attempt in [h for h in self._attempts.values() if h.stream == stream]:
            computing = engine_died and attempt.being_computed
            self._lose(attempt, FailedEvent(attempt.id, reason, True, computing, may_return))
        self._actions += self._links.stream_over(stream, reason)

"""Parts of the state machines of both ends: hand-off states, published ranges, deadlines,
heartbeats, streams and output.

Both ends use the same states, with SGLang's names:

    BOOTSTRAPPING      opened, not granted
    WAITING_FOR_INPUT  granted, nothing published
    TRANSFERRING       pages published, being read
    SUCCESS | FAILED   ended

    BOOTSTRAPPING -> WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS;  all but SUCCESS -> FAILED

A hand-off has ranges from its Grant on. The published token ranges of a hand-off are consecutive.

A heartbeat means that this node's engine makes progress (rule 7). No heartbeat is due while it does
not.
"""

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from common.config import TransferConfig
from common.errors import EngineFault, ProtocolViolation
from common.page_tables import PageSpan, PageTables, num_pages_of
from kvtransfer.frontend_messages import EndStream, PairOutput, SendMessage
from kvtransfer.messages import AnyMessage, Live, Prefix, Source
from kvtransfer.ports import PIECES, NodeEvent, TablePages


class HandoffStatus(Enum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_NEXT = {
    HandoffStatus.BOOTSTRAPPING: {HandoffStatus.WAITING_FOR_INPUT, HandoffStatus.FAILED},
    HandoffStatus.WAITING_FOR_INPUT: {HandoffStatus.TRANSFERRING, HandoffStatus.FAILED},
    HandoffStatus.TRANSFERRING: {
        HandoffStatus.TRANSFERRING,
        HandoffStatus.SUCCESS,
        HandoffStatus.FAILED,
    },
    HandoffStatus.SUCCESS: set(),
    HandoffStatus.FAILED: set(),
}


def advance(old: HandoffStatus, new: HandoffStatus) -> HandoffStatus:
    """Return `new`. Raises EngineFault if a hand-off in state `old` cannot enter it."""
    if new not in _NEXT[old]:
        raise EngineFault(f"a hand-off cannot go from {old.name} to {new.name}")
    return new


_PIECES = PageTables(1)  # one page for each piece


class RangeEnds(NamedTuple):
    """The ends that a range may have, if it is the only one and determines its own length."""

    least: int
    most: int
    step: int  # ends are multiples of this value

    def __contains__(self, end: object) -> bool:
        return isinstance(end, int) and self.least <= end <= self.most and end % self.step == 0


def granted(
    kind: type[Source],
    tables: PageTables,
    *,
    num_tokens: int,
    prefix_tokens: int,
    room_tokens: int,
    destination: PageTables | None = None,
) -> "PageRanges":
    """Return the ranges that may be published for a hand-off of `num_tokens` tokens.

    Args:
        tables: page tables of the producer.
        destination: page tables of the consumer, if its state has another number of pages.
        prefix_tokens: tokens whose KV the consumer has already.
        room_tokens: tokens of a running request for whose KV the consumer has pages.
    Raises:
        ProtocolViolation: the grant is invalid.
    """
    if kind.in_pieces:
        check_prefix(prefix_tokens, 0, 1)
        return PageRanges(_PIECES, _PIECES, num_tokens, 0, 0, ends=RangeEnds(0, num_tokens, 1))
    ends = None
    if kind is Live:
        check_room(prefix_tokens, num_tokens, room_tokens, tables.page_size)
        ends = RangeEnds(num_tokens, room_tokens, 1)
    else:
        check_prefix(prefix_tokens, num_tokens, tables.page_size)
        if kind is Prefix:
            ends = RangeEnds(prefix_tokens, num_tokens, tables.page_size)
    return PageRanges(
        tables, destination or tables, num_tokens, prefix_tokens, prefix_tokens, ends=ends
    )


def table_pages(
    kind: type[Source], tables: PageTables, spans: Sequence[PageSpan]
) -> tuple[TablePages, ...]:
    """Return the number of pages of a range's spans for each table, without those of the state."""
    of_tables = [span for span in spans if span.table < tables.num_tables]
    if kind.in_pieces:
        return tuple(TablePages(PIECES, span.num_pages) for span in of_tables)
    return tuple(TablePages(span.table, span.num_pages) for span in of_tables)


def check_prefix(prefix_tokens: int, num_tokens: int, page_size: int) -> None:
    """Raise ProtocolViolation unless a consumer may hold a prefix of this length."""
    aligned = prefix_tokens % page_size == 0 or prefix_tokens == num_tokens
    if not 0 <= prefix_tokens <= num_tokens or not aligned:
        raise ProtocolViolation(f"invalid prefix of {prefix_tokens} tokens of {num_tokens}")


def check_room(prefix_tokens: int, num_tokens: int, room_tokens: int, page_size: int) -> None:
    """Raise ProtocolViolation unless the prefix and the consumer's capacity fit a running request,
    of which the consumer knows `num_tokens` tokens.
    """
    if prefix_tokens % page_size or not prefix_tokens <= num_tokens <= room_tokens:
        raise ProtocolViolation(
            f"invalid prefix of {prefix_tokens} of {num_tokens} tokens with room for {room_tokens}"
        )


@dataclass(slots=True)
class PageRanges:
    """The consecutive token ranges of one hand-off. All except the last end at a page boundary. The
    last ends with the tokens and may be empty.
    """

    tables: PageTables  # of the producer, whose pages are published
    destination: PageTables  # of the consumer. Differs only in the pages of the state
    num_tokens: int
    start: int  # length of the prefix that the consumer has already
    next: int  # start of the next range
    complete: bool = False
    # Set for a running request (which continues meanwhile), a PREFIX and pieces. These have only
    # one range, which determines the number of tokens.
    ends: RangeEnds | None = None

    @property
    def num_pages(self) -> int:
        """Number of destination pages that the consumer must have."""
        if self.ends is None:
            return num_pages_of(self.destination.handed_over(self.num_tokens, self.start))
        return self.destination.room_pages(self.ends.most, self.start)

    def follow(self, start: int, end: int, num_pages: int, *, last: bool) -> None:
        """Add the range [start, end). Raises ProtocolViolation if it is not a valid next range."""
        wrong = self._complaint(start, end, num_pages, last=last)
        if wrong:
            raise ProtocolViolation(f"range [{start}, {end}) of {self.num_tokens} tokens: {wrong}")
        self.next = end
        self.complete = last
        if self.ends is not None:
            self.num_tokens = end

    def spans(self, start: int, end: int, last: bool) -> tuple[PageSpan, ...]:
        """Return the producer's pages of a range that has been added."""
        return self.tables.spans(self.num_tokens, self.start, start, end, last=last)

    def _complaint(self, start: int, end: int, num_pages: int, *, last: bool) -> str | None:
        if self.complete:
            return "it comes after the last range"
        if start != self.next:
            return f"it does not follow the previous range, which ended at {self.next}"
        if self.ends is not None:
            if not last or end not in self.ends:
                least, most, step = self.ends
                return f"it must be the only one and end at {least} to {most} in steps of {step}"
        elif last and end != self.num_tokens:
            return "it is marked as the last, but does not reach the end"
        if not last and (end <= start or end > self.num_tokens or end % self.tables.page_size):
            return "it must end at a later page boundary"
        num_tokens = end if self.ends is not None else self.num_tokens
        spans = self.tables.spans(num_tokens, self.start, start, end, last=last)
        if num_pages != num_pages_of(spans):
            return f"it has {num_pages} pages, expected {num_pages_of(spans)}"
        return None


# Used until a pace is measured: slow for a GPU, fast for a CPU. Heartbeats detect a dead producer.
# This estimate only keeps hand-offs from being abandoned while a live producer has a long queue.
_FIRST_GUESS_S = 0.005  # per token
_WEIGHT = 0.2  # weight of the newest hand-off in the average
_PATIENCE = 5.0  # multiple of the expected duration


class _Orderable(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Orderable)


class DeadlineTimer(Generic[K]):
    """A timer with at most one deadline per key."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        # May contain outdated entries, whose key has another deadline in `_due`, or none.
        self._heap: list[tuple[float, K]] = []

    def set(self, key: K, when: float) -> None:
        self._due[key] = when
        heapq.heappush(self._heap, (when, key))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(time, key) for key, time in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        self._due.pop(key, None)

    def next(self) -> float | None:
        while self._heap:
            when, key = self._heap[0]
            if self._due.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed, earliest first."""
        due: list[K] = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[1]
            del self._due[key]
            due.append(key)
        return due


class ProducerPace:
    """The measured pace of one producer, in seconds per token, which limits the wait for its
    progress. `progress_s` is the lower bound of that limit.
    """

    def __init__(self, progress_s: float) -> None:
        self._progress_s = progress_s
        self._token_s = _FIRST_GUESS_S

    def limit_s(self, num_tokens: int) -> float:
        """Return how long to wait for progress when `num_tokens` are left to compute."""
        return max(self._progress_s, _PATIENCE * self._token_s * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record that `num_tokens` took `seconds`, including earlier hand-offs in the queue."""
        if num_tokens > 0:
            self._token_s += _WEIGHT * (seconds / num_tokens - self._token_s)


class HeartbeatTimer:
    """Heartbeats of all streams: when to send them, and whose peer is silent."""

    def __init__(self, config: TransferConfig) -> None:
        self._interval_s = config.heartbeat_s
        self._silence_s = config.heartbeat_s * config.max_missed_heartbeats
        self._next: DeadlineTimer[int] = DeadlineTimer()
        self._silence: DeadlineTimer[int] = DeadlineTimer()
        self._sequences: dict[int, int] = {}
        self.moving = True  # whether this node's engine makes progress

    def start(self, stream: int, now: float) -> None:
        self._sequences[stream] = 0
        self._next.set(stream, now + self._interval_s)
        self.heard(stream, now)

    def stop(self, stream: int) -> None:
        del self._sequences[stream]
        self._next.drop(stream)
        self._silence.drop(stream)

    def heard(self, stream: int, now: float) -> None:
        """Record a heartbeat of the peer."""
        self._silence.set(stream, now + self._silence_s)

    def sequence(self, stream: int) -> int:
        """Return the sequence number of the heartbeat to send: 1, 2, ..."""
        self._sequences[stream] += 1
        return self._sequences[stream]

    def take_due(self, now: float) -> list[int]:
        """Return the streams on which to send a heartbeat."""
        due = self._next.take_due(now)
        for stream in due:
            self._next.set(stream, now + self._interval_s)
        return due if self.moving else []

    def take_silent(self, now: float) -> list[int]:
        """Return the streams whose peer has missed several heartbeats."""
        return self._silence.take_due(now)

    def next_deadline(self) -> float | None:
        return earliest((self._next.next(), self._silence.next()))


StreamT = TypeVar("StreamT")
Action = TypeVar("Action")
Actions: TypeAlias = list[Action | SendMessage | EndStream]


class ProtocolEnd(Generic[StreamT, Action]):
    """The streams of either end, with their heartbeats, and the actions that are not returned yet.

    Each input returns the actions to carry out in order. A subclass handles messages (`_receive`)
    and the end of a stream (`_forget_stream`).
    """

    peer: ClassVar[str]  # role of the other node

    def __init__(self, config: TransferConfig) -> None:
        self._streams: dict[int, StreamT] = {}
        self._heartbeats = HeartbeatTimer(config)
        self._actions: Actions[Action] = []

    def engine_moves(self, moving: bool) -> None:
        """Set whether the engine makes progress. Heartbeats are sent only then (rule 7)."""
        self._heartbeats.moving = moving

    def stream_down(
        self, stream: int, reason: str, *, engine_died: bool = False
    ) -> Actions[Action]:
        """Remove an ended stream. No effect if this node has ended it.

        Args:
            engine_died: whether the peer's frontend reports that its engine died.
        """
        if stream in self._streams:
            self._forget_stream(stream, reason, engine_died=engine_died)
        return self._taken()

    def end_streams(self, reason: str) -> Actions[Action]:
        """End all streams. New ones may follow."""
        for stream in tuple(self._streams):
            self._end_stream(stream, reason)
        return self._taken()

    def received(self, stream: int, message: AnyMessage, now: float) -> Actions[Action]:
        """Handle a message of the peer. Messages on an ended stream are dropped."""
        if stream in self._streams:
            try:
                self._receive(stream, message, now)
            except ProtocolViolation as violation:
                self._end_stream(stream, f"protocol violation: {violation}", refused=True)
        return self._taken()

    @abstractmethod
    def _receive(self, stream: int, message: AnyMessage, now: float) -> None: ...

    @abstractmethod
    def _forget_stream(
        self, stream: int, reason: str, *, may_return: bool = True, engine_died: bool = False
    ) -> None: ...

    @abstractmethod
    def _heartbeat(self, stream: int) -> None: ...

    def _tick_streams(self, now: float) -> None:
        """Send due heartbeats, and end streams whose peer is silent."""
        for stream in self._heartbeats.take_due(now):
            self._heartbeat(stream)
        for stream in self._heartbeats.take_silent(now):
            self._end_stream(stream, f"the {self.peer} missed too many heartbeats")

    def _send(self, stream: int, message: AnyMessage) -> None:
        self._actions.append(SendMessage(stream, message))

    def _end_stream(self, stream: int, reason: str, *, refused: bool = False) -> None:
        self._actions.append(EndStream(stream, reason, refused))
        self._forget_stream(stream, reason, may_return=not refused)

    def _taken(self) -> Actions[Action]:
        actions, self._actions = self._actions, []
        return actions


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest time that is not None, or None."""
    return min((time for time in times if time is not None), default=None)


class EventOutlet:
    """The output of the transfer thread: messages to the frontend, and events to the engine."""

    def __init__(self, send: Callable[[PairOutput], None]) -> None:
        self.send = send
        self._events: deque[NodeEvent] = deque()
        self.num_emitted = 0  # events, counted on the transfer thread
        self.num_consumed = 0  # consumed events, counted on the engine thread

    def emit(self, event: NodeEvent) -> None:
        self.num_emitted += 1
        self._events.append(event)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[NodeEvent]:
        """Return the events not consumed yet. Engine thread only."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        self.num_consumed += len(events)
        return events

"""The producer's side of the transfer thread: carries out the actions of ProducerEnd, and publishes
pages on every data path. Knows no requests and counts no pages.

Consumers that have sent Hello wait in `ConsumerAdmissions` until their data paths are prepared.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from common.copy_map import NodeShape
from common.logs import ThrottledLog
from kvtransfer.backends.base import Ints
from kvtransfer.frontend_messages import EndStream, SendMessage
from kvtransfer.messages import (
    AnyMessage,
    HandoffFailed,
    HandoffId,
    InvalidatePrefix,
    OpenHandoff,
    PagesReady,
)
from kvtransfer.pairing import PairHello
from kvtransfer.ports import ProducerCommand, TablePages
from kvtransfer.protocol.actions import ExposePages, ProducerAction, WithdrawPages
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.protocol.progress import EventOutlet, earliest
from kvtransfer.transfer.paths import PageChecksums, PathOffers

WAIT_S = 10.0  # longest preparation. A consumer's dialer waits longer
_log = ThrottledLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class _Waiting:
    instance: int
    preparations: tuple[Future[Any], ...]
    due: float


class ConsumerAdmissions:
    """Consumers that wait for their paths. Transfer thread only.

    Args:
        wake: makes `take_ready` be called soon. Called by any thread.
    """

    def __init__(self, offers: PathOffers, wake: Callable[[], None]) -> None:
        self._offers = offers
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}  # by stream, oldest first

    def begin(self, stream: int, hello: PairHello, now: float) -> None:
        preparations = tuple(self._offers.prepare(stream))
        self._waiting[stream] = _Waiting(hello.instance, preparations, now + WAIT_S)
        for preparation in preparations:
            preparation.add_done_callback(lambda _: self._wake())

    def forget(self, stream: int) -> None:
        """Remove a waiting consumer. The caller must dismiss it at the producers. Idempotent."""
        self._waiting.pop(stream, None)

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(self._waiting)

    def streams_of(self, instance: int) -> list[int]:
        return [stream for stream, one in self._waiting.items() if one.instance == instance]

    def take_ready(self, now: float) -> list[tuple[int, int]]:
        """Remove the consumers whose paths are prepared, or whose wait has expired. Returns
        (stream, instance) of each.
        """
        ready = []
        for stream, waiting in list(self._waiting.items()):
            done = all(preparation.done() for preparation in waiting.preparations)
            if done or now >= waiting.due:
                if not done:
                    _log.warning("data path setup timed out", stream=stream, seconds=WAIT_S)
                del self._waiting[stream]
                ready.append((stream, waiting.instance))
        return ready

    def next_deadline(self) -> float | None:
        return min((waiting.due for waiting in self._waiting.values()), default=None)


CONNECTING_POLL_S = 0.001  # interval of polls while a consumer connects over RDMA
MAX_TOKENS = 16 << 20  # limit of tokens in requests that the engine thread has not consumed
SHORTEST_TOKENS = 1024  # a shorter request counts as this many tokens


class ProducerSide:
    """The producer's side of a node. Transfer thread only.

    Args:
        hello: Hello of this node, without paths. Replaced when its weight version changes.
        wake: ends the transfer thread's sleep. Called by any thread.
        sums: samples pages on publication.
        max_unconsumed_tokens: limit of tokens in one consumer's Opens and InvalidatePrefixes that
            the engine thread has not consumed. Above it, an Open is answered by a retryable Failed,
            and an InvalidatePrefix is dropped.
    """

    def __init__(
        self,
        end: ProducerEnd,
        hello: PairHello,
        offers: PathOffers,
        outlet: EventOutlet,
        wake: Callable[[], None],
        sums: PageChecksums,
        *,
        max_unconsumed_tokens: int = MAX_TOKENS,
    ) -> None:
        self._end = end
        self.hello = hello
        self._offers = offers
        self._outlet = outlet
        self._sums = sums
        self._wake = wake
        self._admissions = ConsumerAdmissions(offers, wake)
        self._held = HeldMessages(outlet.send)
        self._unconsumed = UnconsumedEvents(max_unconsumed_tokens)
        self._exposed: dict[HandoffId, list[tuple[int, Ints]]] = {}
        self._consumers: dict[int, NodeShape] = {}  # by stream
        self._poll_at: float | None = None

    def opened(self, stream: int, hello: PairHello, now: float) -> None:
        for old in self._admissions.streams_of(hello.instance):
            self._reject(old, "the consumer has opened another stream")
        self._consumers[stream] = hello.shape
        self._admissions.begin(stream, hello, now)
        self._answer_ready(now)

    def end_pairs(self, reason: str) -> None:
        """End all pairs. New ones may follow."""
        for stream in self._admissions.streams:
            self._reject(stream, reason)
        self._carry_out(self._end.end_streams(reason))

    def closed(self, stream: int, reason: str, engine_died: bool = False) -> None:
        self._carry_out(self._end.stream_down(stream, reason))
        self._dismiss(stream)

    def received(self, stream: int, message: AnyMessage, now: float) -> None:
        match message:
            case OpenHandoff() if not self._fits(stream, message):
                reason = "the engine has not accepted earlier hand-offs of this consumer"
                failed = HandoffFailed(message.id, reason, retryable=True)
                self._held.send(SendMessage(stream, failed))
            case InvalidatePrefix() if not self._fits(stream, message):
                pass  # the consumer sends it again if the KV causes NaN or Inf again
            case OpenHandoff() | InvalidatePrefix():
                self._ask(stream, message, now)
            case _:
                self._carry_out(self._end.received(stream, message, now))

    def command(self, command: ProducerCommand, now: float) -> None:
        self._carry_out(self._end.command(command))

    def tick(self, now: float, *, engine_moves: bool) -> None:
        self._answer_ready(now)
        self._held.flush()
        self._end.engine_moves(engine_moves)
        self._carry_out(self._end.tick(now))
        self._poll_at = now + CONNECTING_POLL_S if self._end.polls(now) else None
        if self._poll_at is not None:
            self._offers.poll()

    def next_deadline(self) -> float | None:
        admission = self._admissions.next_deadline()
        return earliest((self._end.next_deadline(), admission, self._poll_at))

    def close(self) -> None:
        self._offers.close()

    def _answer_ready(self, now: float) -> None:
        for stream, instance in self._admissions.take_ready(now):
            hello = msgspec.structs.replace(self.hello, paths=self._offers.admit(stream))
            self._outlet.send(SendMessage(stream, hello))
            self._carry_out(self._end.stream_up(stream, instance, now))

    def _fits(self, stream: int, message: OpenHandoff | InvalidatePrefix) -> bool:
        self._unconsumed.consumed(self._outlet.num_consumed)
        return self._unconsumed.fits(stream, message.num_tokens)

    def _ask(self, stream: int, message: OpenHandoff | InvalidatePrefix, now: float) -> None:
        """Pass a message to the protocol, and count it if it causes an event for the engine."""
        emitted = self._outlet.num_emitted
        self._carry_out(self._end.received(stream, message, now))
        if self._outlet.num_emitted > emitted:
            self._unconsumed.add(self._outlet.num_emitted, stream, message.num_tokens)

    def _reject(self, stream: int, reason: str) -> None:
        """Reject a consumer whose Hello has not been answered."""
        self._outlet.send(EndStream(stream, reason, refused=False))
        self._dismiss(stream)

    def _dismiss(self, stream: int) -> None:
        """Revoke everything that the consumer of a stream was given."""
        self._admissions.forget(stream)
        self._held.forget(stream)
        self._consumers.pop(stream, None)
        self._offers.dismiss(stream)

    def _hold(self, stream: int, published: Sequence[Future[Any]]) -> None:
        """Hold messages to the consumer until all ranks serve the pages."""
        for each in published:
            self._held.hold(stream, each)
            each.add_done_callback(lambda _: self._wake())

    def _carry_out(self, actions: Sequence[ProducerAction]) -> None:
        ended = []
        spans: tuple[TablePages, ...] = ()  # tables of the pages that are announced next
        for action in actions:
            match action:
                case SendMessage(stream, PagesReady(pages=pages) as ready) if (
                    sums := self._sums.take(pages, spans, self._consumers.get(stream))
                ):
                    ready = msgspec.structs.replace(ready, sums=sums)
                    self._held.send(SendMessage(stream, ready))
                case SendMessage():
                    self._held.send(action)
                case EndStream(stream):
                    self._outlet.send(action)
                    ended.append(stream)
                case ExposePages(id, stream, pages, spans):
                    self._exposed.setdefault(id, []).append((stream, pages))
                    self._hold(stream, self._offers.publish(stream, pages))
                case WithdrawPages(id):
                    for stream, pages in self._exposed.pop(id, ()):
                        self._offers.withdraw(stream, pages)
                case event:
                    self._outlet.emit(event)
        for stream in ended:  # its pages are withdrawn by now
            self._dismiss(stream)


class HeldMessages:
    """Messages to consumers that wait until other ranks have published pages. Keeps the order
    within each stream. Transfer thread only.
    """

    def __init__(self, send: Callable[[SendMessage], None]) -> None:
        self._send = send
        self._held: dict[int, deque[SendMessage | Future[Any]]] = {}  # by stream, not empty

    def hold(self, stream: int, until: Future[Any]) -> None:
        """Hold the next messages of a stream until `until` is done."""
        self._held.setdefault(stream, deque()).append(until)

    def send(self, message: SendMessage) -> None:
        if message.stream in self._held:
            self._held[message.stream].append(message)
        else:
            self._send(message)

    def flush(self) -> None:
        """Send all messages that need not wait. Raises the error of a rank that failed."""
        for stream, held in list(self._held.items()):
            while held:
                match held[0]:
                    case Future() as until:
                        if not until.done():
                            break
                        until.result()
                    case message:
                        self._send(message)
                held.popleft()
            else:
                del self._held[stream]

    def forget(self, stream: int) -> None:
        self._held.pop(stream, None)


class UnconsumedEvents:
    """Requests of peers that the engine thread has not consumed yet, by stream.

    The engine limits the requests that it has consumed. During a long step, consumers may send
    more, or open and cancel many requests. This class limits those. Events are counted in the order
    in which the engine consumes them. Transfer thread only.

    Args:
        max_tokens: limit shared by all streams: with n streams, each has 1/n. A stream may always
            have a single Open.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._opens: deque[tuple[int, int, int]] = deque()  # (event, stream, tokens)
        self._tokens: Counter[int] = Counter()  # by stream, without zeros

    def fits(self, stream: int, num_tokens: int) -> bool:
        """Return whether one more request of this length may wait."""
        if stream not in self._tokens:
            return True
        share = self._max_tokens // len(self._tokens)
        return self._tokens[stream] + max(num_tokens, SHORTEST_TOKENS) <= share

    def add(self, event: int, stream: int, num_tokens: int) -> None:
        num_tokens = max(num_tokens, SHORTEST_TOKENS)
        self._opens.append((event, stream, num_tokens))
        self._tokens[stream] += num_tokens

    def consumed(self, event: int) -> None:
        """Record that the engine thread has consumed this event and all earlier ones."""
        while self._opens and self._opens[0][0] <= event:
            _, stream, num_tokens = self._opens.popleft()
            self._tokens[stream] -= num_tokens
            if not self._tokens[stream]:
                del self._tokens[stream]

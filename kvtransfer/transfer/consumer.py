"""The consumer's side of the transfer thread: carries out the actions of ConsumerEnd with one link
per pair stream. Knows no requests and counts no pages.

ReadMetrics counts reads by data path. The transfer thread writes the counters and other threads
read them, so the entries of all paths exist from the start.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram
from common.errors import TransferError
from common.logs import ThrottledLog, kv
from kvtransfer.frontend_messages import EndStream, SendMessage
from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import PairHello
from kvtransfer.ports import LINK_PATHS, CompletedEvent, ConsumerCommand, FailedEvent
from kvtransfer.protocol.actions import (
    CloseLink,
    ConfirmRead,
    ConsumerAction,
    ExpectPages,
    OpenLink,
    PageSum,
    StartRead,
)
from kvtransfer.protocol.attempt import ProducerPages
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.progress import EventOutlet, earliest
from kvtransfer.transfer.link import (
    LinkClosed,
    LinkEvent,
    LinkUp,
    PageLink,
    RateMeasured,
    ReadEnded,
)
from kvtransfer.transfer.paths import LinkOpener, PageChecksums

log = logging.getLogger(__name__)


_TOTALS = ("total_read_bytes", "total_read_descriptors", "total_reads_refused")


class ReadMetrics:
    """Counters of reads, and of pages compared by checksum.

    Attributes:
        in_flight: reads posted to links and not ended.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._totals = {f"{name}/{path}": 0.0 for path in LINK_PATHS for name in _TOTALS}
        self._totals |= {f"total_pages_compared/{name}": 0.0 for name in ("passed", "failed")}
        self._seconds = {path: LiveHistogram(distribution.READ_S) for path in LINK_PATHS}

    def ended(self, path: str, read: ReadEnded) -> None:
        """Count one ended read of a link. A path outside LINK_PATHS is not counted."""
        if path not in LINK_PATHS:
            return
        if read.refused:
            self._totals[f"total_reads_refused/{path}"] += 1
            return
        self._totals[f"total_read_bytes/{path}"] += read.num_bytes
        self._totals[f"total_read_descriptors/{path}"] += read.num_parts
        self._seconds[path].add(read.seconds)

    def compared(self, *, right: int, wrong: int) -> None:
        self._totals["total_pages_compared/passed"] += right
        self._totals["total_pages_compared/failed"] += wrong

    def gauges(self) -> dict[str, float]:
        return {"reads_in_flight": float(self.in_flight), **self._totals}

    def distributions(self) -> dict[str, HistogramCounts]:
        return {f"read_seconds/{path}": each.counted() for path, each in self._seconds.items()}


LINK_END_S = 2.0  # for the link threads at the end of the process


@dataclass(slots=True, eq=False)
class _StreamLink:
    """The link of a stream, over the first backend that works. It outlives its stream while it
    closes.
    """

    untried: deque[str]  # backends
    reasons: list[str] = field(default_factory=list)  # why the earlier backends failed
    backend: str = ""  # "": none is left
    path: str = ""  # "": not up yet
    link: PageLink = field(init=False)


class ConsumerSide:
    """The consumer's side of a node. Transfer thread only.

    Args:
        backends: names of the backends that this node may use.
        wake: ends the transfer thread's sleep. Called by links.
        meter: counts every read and every compared page.
        sums: compares pages that producers have sampled.
    """

    def __init__(
        self,
        end: ConsumerEnd,
        hello: PairHello,
        opener: LinkOpener,
        backends: Collection[str],
        outlet: EventOutlet,
        wake: Callable[[], None],
        meter: ReadMetrics,
        sums: PageChecksums,
    ) -> None:
        self._end = end
        self._hello = hello
        self._opener = opener
        self._backends = backends
        self._outlet = outlet
        self._wake = wake
        self._meter = meter
        self._sums = sums
        self._log = ThrottledLog(log)
        self._peers: dict[int, PairHello] = {}  # by stream
        self._links: dict[int, _StreamLink] = {}  # by stream
        self._link_events: deque[tuple[int, LinkEvent]] = deque()  # with their streams
        # Streams whose links must close, each with the reason.
        self._distrusted: list[tuple[int, str]] = []

    def check(self, hello: PairHello) -> None:
        """Raise LayoutMismatch if the pages of a producer cannot be read."""
        self._opener.check(hello)

    def opened(self, stream: int, hello: PairHello, now: float) -> None:
        self._peers[stream] = hello
        there, here = hello.regions[0], self._hello.regions[0]
        pages = ProducerPages(
            there.num_pages,
            hello.state_pages,
            self._hello.same_layout(hello),
            min(there.page_bytes, here.page_bytes),
        )
        self._carry_out(self._end.stream_up(stream, hello.instance, hello.address, pages, now))

    def end_pairs(self, reason: str) -> None:
        """End all pairs. New ones may follow."""
        self._carry_out(self._end.end_streams(reason))

    @property
    def has_links(self) -> bool:
        """Return whether bytes may still land."""
        return bool(self._links)

    def closed(self, stream: int, reason: str, engine_died: bool = False) -> None:
        self._peers.pop(stream, None)
        self._carry_out(self._end.stream_down(stream, reason, engine_died=engine_died))

    def received(self, stream: int, message: AnyMessage, now: float) -> None:
        self._carry_out(self._end.received(stream, message, now))
        while self._distrusted:
            self._carry_out(self._end.distrust(*self._distrusted.pop(), now))

    def command(self, command: ConsumerCommand, now: float) -> None:
        self._carry_out(self._end.command(command, now))

    def tick(self, now: float, *, engine_moves: bool) -> None:
        while self._link_events:
            self._link_event(*self._link_events.popleft(), now)
        for stream, state in list(self._links.items()):
            deadline = state.link.deadline
            if deadline is not None and deadline <= now:
                self._carry_out(self._end.read_late(stream, now))
                state.link.expire(now)
        self._end.engine_moves(engine_moves)
        self._carry_out(self._end.tick(now))
        self._meter.in_flight = self._end.num_reads

    def next_deadline(self) -> float | None:
        links = [state.link.deadline for state in self._links.values()]
        return earliest((self._end.next_deadline(), *links))

    def close(self) -> None:
        links = [state.link for state in self._links.values()]
        for link in links:
            link.close("this node is shutting down")
        for link in links:
            if not link.join(LINK_END_S):
                log.warning("link thread did not stop %s", kv(producer=f"{link.producer:016x}"))

    def _link_event(self, stream: int, event: LinkEvent, now: float) -> None:
        state = self._links[stream]
        match event:
            case LinkUp(path, gib_per_s, members):
                self._log.info("link up", stream=stream, path=path, gib_per_s=gib_per_s)
                state.path = path
                several = members if len(members) > 1 else ()
                self._carry_out(self._end.link_up(stream, path, gib_per_s, several))
            case RateMeasured(gib_per_s):
                self._carry_out(self._end.rate_measured(stream, gib_per_s))
            case ReadEnded(refused=refused):
                self._meter.ended(state.path, event)
                self._carry_out(self._end.read_ended(stream, refused, now))
            case LinkClosed(reason):
                self._log.info("link closed", stream=stream, reason=reason)
                del self._links[stream]
                self._link_closed(stream, state, reason, now)

    def _link_closed(self, stream: int, state: _StreamLink, reason: str, now: float) -> None:
        if not state.path:
            state.reasons.append(f"{state.backend or 'no path'}: {reason}")
            if state.untried and stream in self._peers:
                self._try_next_backend(stream, state)
                return
            reason = "; ".join(state.reasons)
        self._carry_out(self._end.link_closed(stream, reason, now))

    def _open_link(self, stream: int) -> None:
        offered = dict.fromkeys(path.backend for path in self._peers[stream].paths)
        usable = deque(name for name in offered if name in self._backends)
        self._try_next_backend(stream, _StreamLink(usable))

    def _try_next_backend(self, stream: int, state: _StreamLink) -> None:
        def notify(event: LinkEvent) -> None:
            """Queue an event. Called on a link's thread."""
            self._link_events.append((stream, event))
            self._wake()

        state.backend = state.untried.popleft() if state.untried else ""
        state.link = self._opener.open(self._peers[stream], state.backend, notify)
        self._links[stream] = state

    def _carry_out(self, actions: Sequence[ConsumerAction]) -> None:
        for action in actions:
            match action:
                case SendMessage():
                    self._outlet.send(action)
                case EndStream(stream):
                    self._peers.pop(stream, None)
                    self._outlet.send(action)
                case OpenLink(stream):
                    self._open_link(stream)
                case CloseLink(stream, reason):
                    if stream in self._links:
                        self._links[stream].link.close(reason)
                case StartRead(stream, id, pages):
                    # A link that has just broken rejects the read. Its LinkClosed is on the way,
                    # and ends all its reads.
                    with contextlib.suppress(TransferError):
                        self._links[stream].link.post(id, pages)
                case ExpectPages(stream, destination_pages):
                    if stream in self._links:
                        self._links[stream].link.expect(destination_pages)
                case ConfirmRead(stream, held, sums):
                    self._confirm(stream, held, sums)
                case event:
                    self._outlet.emit(event)

    def _confirm(self, stream: int, held: CompletedEvent, sums: Sequence[PageSum]) -> None:
        """Report to the engine whether the pages read match their checksums."""
        wrong = self._sums.wrong(sums, self._peers[stream].shape)
        self._meter.compared(right=len(sums) - len(wrong), wrong=len(wrong))
        if not wrong:
            self._outlet.emit(held)
            return
        state = self._links.get(stream)
        path = state.path if state is not None else ""
        log.error(
            "checksum mismatch of pages read %s",
            kv(
                id=held.id,
                stream=stream,
                path=path or "unknown",
                wrong=len(wrong),
                compared=len(sums),
            ),
        )
        reason = f"{len(wrong)} of {len(sums)} compared pages differ from what was published"
        self._outlet.emit(FailedEvent(held.id, reason, retryable=True))
        self._distrusted.append((stream, reason))

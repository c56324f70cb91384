"""The consumer's end, rule by rule of docs/design/hand-off.md."""

from typing import Any

import msgspec
import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import EngineFault
from common.page_tables import PageTables
from common.request import Remaining
from kvtransfer.frontend_messages import EndStream, SendMessage
from kvtransfer.messages import (
    AnyMessage,
    CancelHandoff,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    Live,
    PagesReady,
    PagesReleased,
    Prompt,
    ReadsDone,
    SampledOutput,
    Weights,
)
from kvtransfer.ports import (
    PIECES,
    CompletedEvent,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    OpenCommand,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
)
from kvtransfer.protocol.actions import (
    CloseLink,
    ConfirmRead,
    ExpectPages,
    OpenLink,
    PageSum,
    StartRead,
)
from kvtransfer.protocol.attempt import LINK_S, ProducerPages
from kvtransfer.protocol.consumer import ConsumerEnd
from tests.support.specs import make_spec

PAGE_SIZE = 4
POOL = 512  # pages of the producer
PAGES = ProducerPages(POOL, state_pages=0, same_layout=True, piece_bytes=96)
CONSUMER = 101
PRODUCER = 11
STREAM = 1
ID = HandoffId(CONSUMER, 1, 1)
OTHER = HandoffId(CONSUMER, 2, 1)
FIRST = PagesReady(ID, 0, 4, (9,), False, None)
LAST = PagesReady(ID, 4, 7, (5,), True, SampledOutput(42))


def opening(id: HandoffId = ID, producer: int = PRODUCER, budget_s: float = 100.0) -> OpenCommand:
    return OpenCommand(id, producer, b"", Remaining(budget_s), Prompt(make_spec(range(7))))


def grant(id: HandoffId = ID, prefix: int = 0, pages: tuple[int, ...] = (30, 31)) -> GrantCommand:
    return GrantCommand(id, prefix, np.array(pages, np.int32))


def sent(actions: list[Any]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, SendMessage)]


def other_actions(actions: list[Any]) -> list[Any]:
    """Return all actions except messages."""
    return [action for action in actions if not isinstance(action, SendMessage)]


def reads(actions: list[Any]) -> list[tuple[HandoffId, list[int], list[int]]]:
    return [
        (action.id, action.pages.source.tolist(), action.pages.destination.tolist())
        for action in actions
        if isinstance(action, StartRead)
    ]


@pytest.fixture
def end() -> ConsumerEnd:
    consumer = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    consumer.stream_up(STREAM, PRODUCER, "host:1", PAGES, 0.0)
    consumer.link_up(STREAM, "tcp", 3.0)
    return consumer


@pytest.fixture
def granted(end: ConsumerEnd) -> ConsumerEnd:
    end.command(opening(), 0.0)
    end.command(grant(), 0.0)
    return end


@pytest.fixture
def done(granted: ConsumerEnd) -> ConsumerEnd:
    """Return a consumer that has read everything. Released has not arrived."""
    granted.received(STREAM, FIRST, 0.0)
    granted.received(STREAM, LAST, 0.0)
    granted.read_ended(STREAM, "", 0.0)
    granted.read_ended(STREAM, "", 0.0)
    return granted


@pytest.fixture
def neighbours(granted: ConsumerEnd) -> ConsumerEnd:
    """Two hand-offs with one read each on the link. The first started first."""
    granted.received(STREAM, FIRST, 0.0)
    granted.command(opening(OTHER), 0.0)
    granted.command(grant(OTHER, 4, (40,)), 0.0)
    granted.received(STREAM, PagesReady(OTHER, 4, 7, (6,), True, SampledOutput(43)), 0.0)
    return granted


def test_a_handoff_goes_from_open_to_held():
    end = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    up = end.stream_up(STREAM, PRODUCER, "host:1", PAGES, 0.0)
    assert up == [OpenLink(STREAM), SendMessage(STREAM, Heartbeat(1, 0, connecting=True))]
    proved = end.link_up(STREAM, "tcp", 3.0)
    up = ProducerUp(PRODUCER, "host:1", "tcp", 3.0, 96)
    assert proved == [SendMessage(STREAM, Heartbeat(2, 0)), up]
    (opened,) = sent(end.command(opening(), 0.0))
    assert opened.id == ID and opened.source == Prompt(make_spec(range(7)))
    assert end.command(grant(), 0.0) == [SendMessage(STREAM, GrantHandoff(ID, 0))]
    admitted = end.received(STREAM, HandoffAdmitted(ID, 7, 20), 0.0)
    assert admitted == [HandoffAdmitted(ID, 7, 20)]
    assert reads(end.received(STREAM, FIRST, 0.0)) == [(ID, [9], [30])]
    last = end.received(STREAM, LAST, 0.0)
    assert last[0] == FirstTokenEvent(ID, SampledOutput(42))  # before its pages have arrived
    assert reads(last) == [(ID, [5], [31])]
    assert end.read_ended(STREAM, "", 0.0) == []
    assert end.read_ended(STREAM, "", 0.0) == [SendMessage(STREAM, ReadsDone(ID))]
    # Held first: the pages must have another holder before the read releases them.
    assert end.received(STREAM, PagesReleased(ID, True), 0.0) == [
        CompletedEvent(ID, num_tokens=7),
        ReadsEndedEvent(ID),
    ]
    assert end.num_open == 0 and end.num_reads == 0


def test_a_read_writes_to_the_pages_of_its_own_range(end):
    end.command(opening(), 0.0)
    end.command(grant(prefix=4, pages=(31,)), 0.0)
    assert reads(end.received(STREAM, LAST, 0.0)) == [(ID, [5], [31])]


def test_a_full_prefix_hit_transfers_no_page(end):
    end.command(opening(), 0.0)
    end.command(grant(prefix=7, pages=()), 0.0)
    ready = end.received(STREAM, PagesReady(ID, 7, 7, (), True, SampledOutput(42)), 0.0)
    assert ready == [FirstTokenEvent(ID, SampledOutput(42)), SendMessage(STREAM, ReadsDone(ID))]
    assert end.received(STREAM, PagesReleased(ID, True), 0.0) == [
        CompletedEvent(ID, num_tokens=7),
        ReadsEndedEvent(ID),
    ]


def test_a_hand_off_to_an_unpaired_producer_fails_at_once(end):
    (lost,) = end.command(opening(producer=12), 0.0)
    assert isinstance(lost, FailedEvent) and lost.retryable
    # Its grant, which the engine may have posted by then, releases the pages.
    assert end.command(grant(), 0.0) == [ReadsEndedEvent(ID)]


def test_a_producer_without_a_proven_link_gets_no_hand_off():
    end = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    end.stream_up(STREAM, PRODUCER, "host:1", PAGES, 0.0)
    assert isinstance(end.command(opening(), 0.0)[0], FailedEvent)


def test_an_abandoned_attempt_drops_its_queued_reads(end):
    end.command(opening(), 0.0)
    end.command(grant(), 0.0)
    end.command(opening(OTHER), 0.0)
    end.command(grant(OTHER), 0.0)
    assert len(reads(end.received(STREAM, FIRST, 0.0))) == 1
    assert len(reads(end.received(STREAM, LAST, 0.0))) == 1
    assert reads(end.received(STREAM, PagesReady(OTHER, 0, 4, (2,), False, None), 0.0)) == []
    assert end.command(CancelHandoff(OTHER, ""), 0.0)[-1] == ReadsEndedEvent(OTHER)
    assert end.read_ended(STREAM, "", 0.0) == []


# Seen failing with a producer announced once for each link, and if a closing link is closed again.
def test_a_reopened_link_is_no_new_producer(end):
    assert end.distrust(STREAM, "a page has another checksum", 1.0) == [
        CloseLink(STREAM, "a page has another checksum")
    ]
    assert end.distrust(STREAM, "twice", 1.0) == []
    assert other_actions(end.link_closed(STREAM, "closed", 2.0)) == [OpenLink(STREAM)]
    assert other_actions(end.link_up(STREAM, "tcp", 3.0)) == []


# Seen failing with the reads in reverse order, and with a link that is up while it closes.
def test_reads_of_a_closed_link_move_to_its_successor_in_order(granted):
    granted.received(STREAM, FIRST, 0.0)
    granted.received(STREAM, LAST, 0.0)
    granted.distrust(STREAM, "a page has another checksum", 1.0)
    assert granted.link_up(STREAM, "tcp", 3.0) == []  # the proof of the link that closes
    granted.link_closed(STREAM, "closed", 2.0)
    again = reads(granted.link_up(STREAM, "tcp", 3.0))
    assert again == [(ID, [9], [30]), (ID, [5], [31])]


# Seen failing with the time of the last range.
def test_a_first_token_comes_with_the_time_of_the_first_range(granted):
    granted.received(STREAM, FIRST, 1.0)
    assert granted.received(STREAM, LAST, 2.0)[0] == FirstTokenEvent(
        ID, SampledOutput(42), first_ready=1.0
    )


# Seen failing without the rate of the link, and if all granted pages are expected.
def test_the_grant_of_a_running_request_has_the_rate_and_expects_pages_of_the_near_future(end):
    running = opening()
    end.command(msgspec.structs.replace(running, source=Live(make_spec(range(7)), 5)), 0.0)
    pages = np.arange(30, 40, dtype=np.int32)
    said, expected = end.command(GrantCommand(ID, 0, pages, room_tokens=40), 0.0)
    assert said == SendMessage(STREAM, GrantHandoff(ID, 0, 40, 3.0))
    assert isinstance(expected, ExpectPages) and expected.stream == STREAM
    assert expected.destination_pages.tolist() == [30, 31, 32, 33]  # of 7 tokens, and two more


# Seen failing without the `post` in read_ended, and with one only for active attempts.
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_queued_read_starts_when_one_ends(granted, cancelled):
    granted.command(opening(OTHER), 0.0)
    granted.command(grant(OTHER), 0.0)
    granted.received(STREAM, FIRST, 0.0)
    granted.received(STREAM, LAST, 0.0)
    assert reads(granted.received(STREAM, PagesReady(OTHER, 0, 4, (2,), False, None), 0.0)) == []
    if cancelled:
        granted.command(CancelHandoff(ID, "client"), 0.0)
    assert reads(granted.read_ended(STREAM, "", 0.0)) == [(OTHER, [2], [30])]


# Rule 1: the attempt ends before its link is closed, and its pages are kept longer. Rule 11. Seen
# failing without the appendleft in link_closed.
def test_a_late_read_fails_its_own_attempt_and_no_other(neighbours):
    late = neighbours.read_late(STREAM, 9.0)
    assert sent(late) == [CancelHandoff(ID, "a read passed its deadline")]
    assert other_actions(late) == [
        FailedEvent(ID, "a read passed its deadline", True),
        CloseLink(STREAM, "a read passed its deadline"),
    ]
    closed = neighbours.link_closed(STREAM, "closed", 9.1)
    assert other_actions(closed) == [ReadsEndedEvent(ID), OpenLink(STREAM)]
    assert reads(neighbours.link_up(STREAM, "tcp", 3.0)) == [(OTHER, [6], [40])]
    assert sent(neighbours.read_ended(STREAM, "", 9.2)) == [ReadsDone(OTHER)]


def test_a_link_that_breaks_fails_the_attempt_that_it_was_reading(neighbours):
    broken = neighbours.link_closed(STREAM, "reset", 1.0)
    assert sent(broken) == [CancelHandoff(ID, "reset"), Heartbeat(3, 1, connecting=True)]
    assert other_actions(broken) == [
        FailedEvent(ID, "reset", True),
        ReadsEndedEvent(ID),
        OpenLink(STREAM),
    ]
    assert reads(neighbours.link_up(STREAM, "tcp", 3.0)) == [(OTHER, [6], [40])]


def test_a_rejected_read_fails_its_attempt_and_no_link(neighbours):
    refused = neighbours.read_ended(STREAM, "not published", 1.0)
    assert sent(refused) == [CancelHandoff(ID, "read refused: not published")]
    assert other_actions(refused) == [
        FailedEvent(ID, "read refused: not published", True),
        ReadsEndedEvent(ID),
    ]
    assert sent(neighbours.read_ended(STREAM, "", 1.0)) == [ReadsDone(OTHER)]


@pytest.mark.parametrize("engine_died", [False, True])
def test_only_requests_being_computed_are_notified_of_an_engine_crash(granted, engine_died):
    done, waits = HandoffId(CONSUMER, 3, 1), HandoffId(CONSUMER, 4, 1)
    for id, pages in ((OTHER, (32, 33)), (done, (34, 35)), (waits, (36, 37))):
        granted.command(opening(id), 0.0)
        granted.command(grant(id, pages=pages), 0.0)
    for id in (ID, OTHER, done):
        granted.received(STREAM, HandoffAdmitted(id, 7, 0), 0.0)
    granted.received(STREAM, FIRST, 0.0)
    granted.received(STREAM, PagesReady(done, 0, 7, (1, 2), True, SampledOutput(42)), 0.0)
    over = granted.stream_down(STREAM, "it has ended", engine_died=engine_died)
    lost = {action.id: action.engine_died for action in over if isinstance(action, FailedEvent)}
    assert lost == {ID: engine_died, OTHER: engine_died, done: False, waits: False}


# Rule 10. Seen failing if stream_up keeps the link of stream 1 for stream 2.
def test_a_new_instance_of_a_producer_gets_its_own_link(granted):
    granted.received(STREAM, FIRST, 0.0)
    gone = granted.stream_down(STREAM, "reset")
    assert gone == [
        ProducerDown(PRODUCER, "host:1", "reset"),
        FailedEvent(ID, "reset", retryable=True, may_return=True),
        CloseLink(STREAM, "reset"),
    ]
    assert granted.stream_up(2, PRODUCER + 1, "host:1", PAGES, 1.0)[0] == OpenLink(2)
    granted.link_up(2, "tcp", 3.0)
    granted.command(opening(OTHER, PRODUCER + 1), 1.0)
    granted.command(grant(OTHER, 4, (40,)), 1.0)
    ready = granted.received(2, PagesReady(OTHER, 4, 7, (6,), True, SampledOutput(43)), 1.0)
    assert [action.stream for action in ready if isinstance(action, StartRead)] == [2]
    assert granted.read_ended(2, "", 1.0) == [SendMessage(2, ReadsDone(OTHER))]
    # The old link may take any time: its read was for the old instance alone.
    assert granted.link_closed(STREAM, "closed", 2.0) == [ReadsEndedEvent(ID)]


# Seen failing without the check of the address: the pair with the producer itself ends.
def test_an_instance_paired_at_another_address_is_rejected(granted):
    (end,) = granted.stream_up(2, PRODUCER, "thief:1", PAGES, 1.0)
    assert isinstance(end, EndStream) and end.stream == 2 and end.refused
    assert "host:1" in end.reason
    assert granted.num_open == 1


@pytest.mark.parametrize(
    "admitted", [HandoffAdmitted(ID, 8, 0), HandoffAdmitted(ID, 7, POOL * PAGE_SIZE + 1)]
)
def test_more_tokens_than_exist_are_not_awaited(granted, admitted):
    """Seen failing without either check: the stream continues, and the consumer waits for the
    producer."""
    actions = granted.received(STREAM, admitted, 0.0)
    assert any(isinstance(action, EndStream) and action.refused for action in actions)


# Rule 5. Seen failing without the loop in stream_up.
def test_a_second_stream_of_a_producer_ends_the_first(granted):
    actions = granted.stream_up(2, PRODUCER, "host:1", PAGES, 1.0)
    assert [type(action) for action in other_actions(actions)] == [
        EndStream,
        ProducerDown,
        FailedEvent,
        ReadsEndedEvent,
        CloseLink,
        OpenLink,
    ]
    assert granted.received(STREAM, FIRST, 1.0) == []
    assert granted.stream_down(STREAM, "closed") == []


# Rule 2. Seen failing without each Cancel.
@pytest.mark.parametrize("held", [False, None], ids=["not-held", "no-answer"])
def test_without_a_positive_released_nothing_is_held(done, held):
    actions = (
        done.tick(2.0) if held is None else done.received(STREAM, PagesReleased(ID, held), 1.0)
    )
    assert [type(action) for action in other_actions(actions)] == [FailedEvent, ReadsEndedEvent]
    assert any(isinstance(m, CancelHandoff) for m in sent(actions)) is (held is None)
    # A late answer changes nothing.
    assert done.received(STREAM, PagesReleased(ID, True), 3.0) == []


def test_failed_while_released_is_awaited_fails_the_attempt(done):
    actions = done.received(STREAM, HandoffFailed(ID, "draining", True), 1.0)
    assert actions == [FailedEvent(ID, "draining", True), ReadsEndedEvent(ID)]


def test_a_failure_that_every_producer_would_repeat_is_not_retryable(granted):
    actions = granted.received(STREAM, HandoffFailed(ID, "too long", False), 0.0)
    assert actions == [FailedEvent(ID, "too long", False), ReadsEndedEvent(ID)]


@pytest.mark.parametrize(
    "message",
    [
        PagesReady(OTHER, 0, 4, (9,), False, None),
        HandoffAdmitted(OTHER, 1, 1),
        PagesReady(ID, 4, 7, (5,), True, SampledOutput(42)),
        PagesReady(ID, 0, 3, (9,), False, None),
        PagesReady(ID, 0, 4, (9, 5), False, None),
        PagesReady(ID, 0, 4, (POOL,), False, None),
        PagesReady(ID, 0, 4, (-1,), False, None),
        PagesReady(ID, 0, 7, (9, 5), True, SampledOutput(42, (7,))),
        PagesReady(ID, 0, 4, (9,), True, SampledOutput(42)),
        PagesReady(ID, 0, 8, (9, 5), False, None),
        PagesReady(ID, 0, 7, (9, 5), True, None),
        PagesReady(ID, 0, 0, (), False, None),
        PagesReleased(ID, True),
        CancelHandoff(ID, ""),
    ],
    ids=[
        "ready-before-grant",
        "admitted-before-grant",
        "gap",
        "not-at-a-page's-edge",
        "pages-that-do-not-match",
        "page-out-of-range",
        "page-below-zero",
        "tokens-of-no-running-request",
        "last-but-not-the-end",
        "past-the-end",
        "last-without-its-token",
        "empty-but-not-last",
        "released-before-done",
        "a-consumer's-message",
    ],
)
def test_a_violation_ends_only_its_stream_and_the_hand_offs_of_it(granted, message):
    granted.command(opening(OTHER), 0.0)
    granted.stream_up(2, PRODUCER + 1, "host:2", PAGES, 0.0)
    granted.link_up(2, "tcp", 3.0)
    granted.command(opening(HandoffId(CONSUMER, 3, 1), PRODUCER + 1), 0.0)
    actions = granted.received(STREAM, message, 0.0)
    assert [type(action) for action in actions] == [
        EndStream,
        ProducerDown,
        FailedEvent,
        ReadsEndedEvent,
        FailedEvent,
        CloseLink,
    ]
    assert actions[0].refused and "violation" in actions[0].reason
    assert not actions[2].may_return
    assert granted.num_open == 1


@pytest.mark.parametrize("message", [FIRST, LAST], ids=["twice", "after-the-last"])
def test_a_range_after_the_last_is_a_violation(done, message):
    assert isinstance(done.received(STREAM, message, 0.0)[0], EndStream)


def test_an_attempt_of_another_stream_is_a_violation(granted):
    granted.stream_up(2, PRODUCER + 1, "host:2", PAGES, 0.0)
    (ended, *_) = granted.received(2, FIRST, 0.0)
    assert isinstance(ended, EndStream) and ended.stream == 2
    assert granted.num_open == 1


@pytest.mark.parametrize(
    "command",
    [opening(), grant(), grant(OTHER, 0, (1,)), grant(OTHER, 3, (1, 2))],
    ids=["opened-twice", "granted-twice", "pages", "prefix"],
)
def test_an_engine_that_contradicts_itself_raises_an_error(granted, command):
    granted.command(opening(OTHER), 0.0)
    with pytest.raises(EngineFault):
        granted.command(command, 0.0)


class TestDeadlines:
    """Deadlines of streams that need no heartbeats."""

    @pytest.fixture
    def end(self) -> ConsumerEnd:
        consumer = ConsumerEnd(TransferConfig(heartbeat_s=1e6), PageTables(PAGE_SIZE))
        consumer.stream_up(STREAM, PRODUCER, "host:1", PAGES, 0.0)
        consumer.link_up(STREAM, "tcp", 3.0)
        consumer.command(opening(), 0.0)
        consumer.command(grant(), 0.0)
        return consumer

    def test_progress_is_awaited_from_admission_on(self, end: ConsumerEnd) -> None:
        assert end.next_deadline() == 100.0  # the producer's queue is not progress
        end.received(STREAM, HandoffAdmitted(ID, 7, 0), 50.0)
        assert end.next_deadline() == 60.0
        end.received(STREAM, FIRST, 55.0)
        assert end.next_deadline() == 65.0
        actions = end.tick(65.0)
        assert sent(actions) == [CancelHandoff(ID, "the producer made no progress")]

    def test_a_producer_with_a_long_queue_has_more_time(self, end: ConsumerEnd) -> None:
        end.received(STREAM, HandoffAdmitted(ID, 7, 1993), 0.0)
        assert end.next_deadline() == 50.0

    def test_a_fast_producer_has_less_time(self, end: ConsumerEnd) -> None:
        end.received(STREAM, HandoffAdmitted(ID, 7, 1993), 0.0)
        end.received(STREAM, FIRST, 0.0)
        end.received(STREAM, LAST, 0.2)
        end.command(opening(OTHER), 1.0)
        end.command(grant(OTHER), 1.0)
        end.received(STREAM, HandoffAdmitted(OTHER, 7, 1993), 1.0)
        assert end.next_deadline() == pytest.approx(41.2)

    def test_the_deadline_ends_an_attempt_for_every_producer(self, end: ConsumerEnd) -> None:
        actions = end.tick(100.0)
        assert sent(actions) == [CancelHandoff(ID, "the request's time is used up")]
        assert FailedEvent(ID, "the request's time is used up", False) in actions

    # Seen failing without the deadline for the close of a link.
    def test_a_link_that_does_not_close_ends_the_stream(self, end: ConsumerEnd) -> None:
        end.received(STREAM, FIRST, 0.0)
        end.read_late(STREAM, 5.0)
        assert end.next_deadline() == 5.0 + LINK_S
        assert isinstance(end.tick(5.0 + LINK_S)[0], EndStream)

    def test_a_link_that_is_not_reopened_ends_the_stream(self, end: ConsumerEnd) -> None:
        end.received(STREAM, FIRST, 0.0)
        end.read_late(STREAM, 5.0)
        end.link_closed(STREAM, "closed", 6.0)
        assert end.next_deadline() == 6.0 + LINK_S
        assert isinstance(end.tick(6.0 + LINK_S)[0], EndStream)


def test_a_producer_that_misses_five_heartbeats_has_failed(granted):
    granted.received(STREAM, Heartbeat(1, 0), 1.0)
    assert EndStream not in map(type, granted.tick(5.9))
    actions = granted.tick(6.0)
    assert [type(action) for action in other_actions(actions)] == [
        EndStream,
        ProducerDown,
        FailedEvent,
        ReadsEndedEvent,
        CloseLink,
    ]


# Rule 7. Seen failing without the check of `moving`.
def test_heartbeats_stop_while_the_engine_makes_no_progress(end):
    end.engine_moves(False)
    assert end.tick(1.0) == []
    end.engine_moves(True)
    assert sent(end.tick(2.0)) == [Heartbeat(3, 0)]
    end.engine_moves(False)
    assert sent(end.link_closed(STREAM, "reset", 2.0)) == []


# Seen failing if only the first stream ends.
def test_all_streams_can_be_ended_at_once(granted):
    granted.stream_up(2, PRODUCER + 1, "host:2", PAGES, 0.0)
    granted.link_up(2, "tcp", 3.0)
    granted.command(opening(OTHER, PRODUCER + 1), 0.0)
    actions = granted.end_streams("other weights")
    assert [action.stream for action in actions if isinstance(action, EndStream)] == [STREAM, 2]
    assert [a.may_return for a in actions if isinstance(a, FailedEvent)] == [True, True]
    assert granted.num_open == 0


# Seen failing if checksums are ignored, and if those of the last range replace all.
def test_pages_with_checksums_are_compared_before_they_are_held(granted):
    granted.received(STREAM, PagesReady(ID, 0, 4, (9,), False, None, sums=((0, 111),)), 0.0)
    granted.received(
        STREAM, PagesReady(ID, 4, 7, (5,), True, SampledOutput(42), sums=((0, 222),)), 0.0
    )
    granted.read_ended(STREAM, "", 0.0)
    granted.read_ended(STREAM, "", 0.0)
    (confirm, ended) = granted.received(STREAM, PagesReleased(ID, True), 0.0)
    sums = PageSum(30, 0, 111), PageSum(31, 0, 222)
    assert confirm == ConfirmRead(STREAM, CompletedEvent(ID, num_tokens=7), sums)
    assert ended == ReadsEndedEvent(ID)


def test_a_link_that_cannot_be_opened_ends_the_stream():
    end = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    end.stream_up(STREAM, PRODUCER, "host:1", PAGES, 0.0)
    (ended,) = end.link_closed(STREAM, "nixl: another host; tcp: refused", 1.0)
    assert isinstance(ended, EndStream) and "tcp: refused" in ended.reason


# A state with a different number of pages at the producer


@pytest.fixture
def unlike() -> ConsumerEnd:
    """A consumer whose state has two pages. The producer's has three, with other contents."""
    consumer = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE, (None, 5), state_pages=2))
    pages = ProducerPages(POOL, state_pages=3, same_layout=False, piece_bytes=96)
    consumer.stream_up(STREAM, PRODUCER, "host:1", pages, 0.0)
    consumer.link_up(STREAM, "tcp", 3.0)
    return consumer


# Seen failing with the consumer's count in `follow` (the stream ends), with the producer's in
# `grant` (EngineFault), and with checksums of the state kept (IndexError).
def test_each_side_has_its_own_number_of_pages_of_the_state(unlike):
    unlike.command(opening(), 0.0)
    unlike.command(grant(pages=(30, 31, 40, 41, 50, 51)), 0.0)
    unlike.received(STREAM, PagesReady(ID, 0, 4, (1, 2), False, None), 0.0)
    last = PagesReady(ID, 4, 7, (3, 4, 5, 6, 7), True, SampledOutput(42), sums=((1, 9), (4, 1)))
    read = next(a for a in unlike.received(STREAM, last, 0.0) if isinstance(a, StartRead))
    assert read.pages.source.tolist() == [3, 4, 5, 6, 7]
    assert read.pages.destination.tolist() == [31, 41, 50, 51]
    assert read.pages.spans == ((0, 1), (1, 1))
    for _ in range(2):
        unlike.read_ended(STREAM, "", 0.0)
    (confirm, *_) = unlike.received(STREAM, PagesReleased(ID, True), 0.0)
    assert confirm.sums == (PageSum(41, 1, 9),)


def test_a_producer_that_publishes_the_consumers_number_of_state_pages_violates_the_protocol(
    unlike,
):
    unlike.command(opening(), 0.0)
    unlike.command(grant(pages=(30, 31, 40, 41, 50, 51)), 0.0)
    ended = unlike.received(
        STREAM, PagesReady(ID, 0, 7, (1, 2, 3, 4, 5, 6), True, SampledOutput(42)), 0.0
    )
    assert "it has 6 pages" in next(a for a in ended if isinstance(a, EndStream)).reason


# Seen failing if pieces are read as pages of the first table.
def test_pieces_of_weights_are_no_pages_of_a_table(unlike):
    unlike.command(OpenCommand(ID, PRODUCER, b"", Remaining(100.0), Weights(0, 2, 96)), 0.0)
    unlike.command(grant(pages=(30, 31)), 0.0)
    ready = unlike.received(STREAM, PagesReady(ID, 0, 2, (1, 2), True, None), 0.0)
    read = next(a for a in ready if isinstance(a, StartRead))
    assert read.pages.destination.tolist() == [30, 31] and read.pages.spans == ((PIECES, 2),)

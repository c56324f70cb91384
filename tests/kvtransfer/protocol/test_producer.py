"""The producer's end, rule by rule of docs/design/hand-off.md."""

from typing import Any

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
    OpenHandoff,
    PagesReady,
    PagesReleased,
    Prompt,
    ReadsDone,
    SampledOutput,
)
from kvtransfer.ports import AdmittedCommand, ClosedEvent, GrantedEvent, OpenedEvent, PublishCommand
from kvtransfer.protocol.actions import ExposePages, WithdrawPages
from kvtransfer.protocol.producer import POLL_S, ProducerEnd
from tests.support.specs import make_spec

PAGE_SIZE = 4
CONSUMER = 101
STREAM = 1
ID = HandoffId(CONSUMER, 1, 1)
SERIAL = 1  # of the first hand-off
OTHER = HandoffId(CONSUMER, 2, 1)


def opening(id: HandoffId = ID, num_tokens: int = 7, budget_s: float = 100.0) -> OpenHandoff:
    return OpenHandoff(id, b"", Remaining(budget_s), Prompt(make_spec(range(num_tokens))))


def publish(start: int, end: int, pages: list[int], *, last: bool = False) -> PublishCommand:
    return PublishCommand(
        SERIAL, start, end, np.array(pages, np.int32), last, SampledOutput(42) if last else None
    )


def kinds(actions: list[Any]) -> list[type]:
    return [type(action) for action in actions]


def sent(actions: list[Any]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, SendMessage)]


@pytest.fixture
def end() -> ProducerEnd:
    producer = ProducerEnd(TransferConfig(), PageTables(PAGE_SIZE), max_handoffs=3)
    producer.stream_up(STREAM, CONSUMER, 0.0)
    return producer


@pytest.fixture
def granted(end: ProducerEnd) -> ProducerEnd:
    end.received(STREAM, opening(), 0.0)
    end.received(STREAM, GrantHandoff(ID, 0), 0.0)
    return end


@pytest.fixture
def published(granted: ProducerEnd) -> ProducerEnd:
    granted.command(publish(0, 4, [9]))
    granted.command(publish(4, 7, [5], last=True))
    return granted


def test_a_handoff_goes_from_open_to_released(end):
    (opened,) = end.received(STREAM, opening(), 0.0)
    assert isinstance(opened, OpenedEvent)
    assert opened.source == Prompt(make_spec(range(7)))
    assert end.received(STREAM, GrantHandoff(ID, 0), 0.0) == [GrantedEvent(SERIAL, 0)]
    assert sent(end.command(AdmittedCommand(SERIAL, 7, 20))) == [HandoffAdmitted(ID, 7, 20)]
    exposed, reported = end.command(publish(0, 4, [9]))
    assert isinstance(exposed, ExposePages)  # readable before the consumer knows it
    assert reported == SendMessage(STREAM, PagesReady(ID, 0, 4, (9,), False, None))
    assert sent(end.command(publish(4, 7, [5], last=True))) == [
        PagesReady(ID, 4, 7, (5,), True, SampledOutput(42))
    ]
    assert end.received(STREAM, ReadsDone(ID), 1.0) == [
        SendMessage(STREAM, PagesReleased(ID, True)),
        WithdrawPages(ID),  # no consumer reads them when the engine releases them
        ClosedEvent(SERIAL, ID, True, "the consumer has all pages"),
    ]
    assert end.num_open == 0


def test_a_handoff_without_pages_is_held(end):
    end.received(STREAM, opening(), 0.0)
    end.received(STREAM, GrantHandoff(ID, 7), 0.0)
    assert sent(end.command(publish(7, 7, [], last=True))) == [
        PagesReady(ID, 7, 7, (), True, SampledOutput(42))
    ]
    assert sent(end.received(STREAM, ReadsDone(ID), 0.0)) == [PagesReleased(ID, True)]


# Rule 8. Seen failing, each, without the call of _granted.
@pytest.mark.parametrize(
    "command", [AdmittedCommand(SERIAL, 3, 0), publish(0, 4, [5])], ids=["admit", "ready"]
)
def test_an_engine_that_computes_before_the_grant_raises_an_error(end, command):
    end.received(STREAM, opening(), 0.0)
    with pytest.raises(EngineFault, match="before its grant"):
        end.command(command)


# Rule 3. Seen failing, each, without the answer.
def test_done_of_an_unknown_id_is_answered_not_held(end):
    assert end.received(STREAM, ReadsDone(ID), 0.0) == [
        SendMessage(STREAM, PagesReleased(ID, False))
    ]


def test_grant_of_an_unknown_id_is_answered_failed(end):
    (answer,) = sent(end.received(STREAM, GrantHandoff(ID, 0), 0.0))
    assert isinstance(answer, HandoffFailed) and answer.id == ID and answer.retryable


def test_cancel_of_an_unknown_id_is_dropped(end):
    assert end.received(STREAM, CancelHandoff(ID, "why"), 0.0) == []


def test_the_end_of_a_stream_drops_only_its_hand_offs(published):
    published.stream_up(2, CONSUMER + 1, 0.0)
    other = HandoffId(CONSUMER + 1, 1, 1)
    published.received(2, opening(other), 0.0)
    assert published.stream_down(STREAM, "reset") == [
        WithdrawPages(ID),
        ClosedEvent(SERIAL, ID, False, "reset"),
    ]
    assert published.num_open == 1
    assert published.stream_down(STREAM, "again") == []


# Rule 5. Seen failing without the loop in stream_up.
def test_a_second_hello_of_a_consumer_ends_its_first_stream(published):
    actions = published.stream_up(2, CONSUMER, 1.0)
    assert kinds(actions) == [EndStream, WithdrawPages, ClosedEvent]
    assert actions[0].stream == STREAM and not actions[0].refused
    # Messages in flight on the old stream, and its end, do not affect the new one.
    published.received(2, opening(OTHER), 1.0)
    assert published.received(STREAM, ReadsDone(ID), 1.0) == []
    assert published.stream_down(STREAM, "closed") == []
    assert published.num_open == 1


@pytest.mark.parametrize(
    "message",
    [
        opening(),
        GrantHandoff(ID, 0),
        ReadsDone(ID),
        ReadsDone(HandoffId(CONSUMER + 1, 1, 1)),
        opening(HandoffId(CONSUMER + 1, 9, 1)),
        PagesReleased(ID, True),
        GrantHandoff(OTHER, 3),
        GrantHandoff(OTHER, 8),
    ],
    ids=[
        "second-open",
        "second-grant",
        "done-before-the-last-ready",
        "of-another-consumer",
        "opened-in-the-name-of-another-consumer",
        "an-producer's-message",
        "prefix-not-at-a-page's-edge",
        "prefix-longer-than-the-prompt",
    ],
)
def test_a_violation_ends_only_its_stream_and_the_hand_offs_of_it(granted, message):
    granted.received(STREAM, opening(OTHER), 0.0)
    granted.stream_up(2, CONSUMER + 1, 0.0)
    granted.received(2, opening(HandoffId(CONSUMER + 1, 1, 1)), 0.0)
    actions = granted.received(STREAM, message, 0.0)
    assert kinds(actions) == [EndStream, WithdrawPages, ClosedEvent, WithdrawPages, ClosedEvent]
    assert actions[0].refused and "violation" in actions[0].reason
    assert granted.num_open == 1


def test_an_attempt_of_another_stream_is_a_violation(granted):
    granted.stream_up(2, CONSUMER + 1, 0.0)
    actions = granted.received(2, CancelHandoff(ID, ""), 0.0)
    assert kinds(actions) == [EndStream] and actions[0].stream == 2
    assert granted.num_open == 1


# test_progress.py and the violations of test_consumer.py have the other wrong ranges.
def test_an_engine_that_publishes_the_wrong_range_raises_an_error(granted):
    with pytest.raises(EngineFault, match="cannot publish"):
        granted.command(publish(4, 7, [5], last=True))


def test_the_deadline_ends_a_hand_off_in_any_state(end):
    end.received(STREAM, opening(budget_s=0.5), 0.0)
    assert end.next_deadline() == 0.5
    assert end.tick(0.5) == [
        SendMessage(STREAM, HandoffFailed(ID, "the request's time is used up", False)),
        WithdrawPages(ID),
        ClosedEvent(SERIAL, ID, False, "the request's time is used up"),
    ]


def test_a_consumer_that_misses_five_heartbeats_is_dropped(published):
    published.received(STREAM, Heartbeat(1, 1), 1.0)
    published.received(STREAM, ReadsDone(OTHER), 5.5)  # no heartbeat
    assert EndStream not in kinds(published.tick(5.9))
    actions = published.tick(6.0)
    assert kinds(actions)[-3:] == [EndStream, WithdrawPages, ClosedEvent]


# Rule 7. Seen failing without the check of `moving`.
def test_heartbeats_stop_while_the_engine_makes_no_progress(published):
    assert sent(published.tick(1.0)) == [Heartbeat(1, 1)]
    published.engine_moves(False)
    assert sent(published.tick(2.0)) == []
    published.engine_moves(True)
    assert sent(published.tick(3.0)) == [Heartbeat(2, 1)]


def test_an_open_over_the_limit_is_answered_failed(end):
    for request in range(3):
        end.received(STREAM, opening(HandoffId(CONSUMER, request, 1)), 0.0)
    (answer,) = sent(end.received(STREAM, opening(HandoffId(CONSUMER, 9, 1)), 0.0))
    assert isinstance(answer, HandoffFailed) and answer.retryable
    assert end.num_open == 3


def test_a_producer_polls_while_a_consumer_connects(end):
    assert end.polls(0.0) and not end.polls(POLL_S)
    end.received(STREAM, Heartbeat(1, 0, connecting=False), 1.0)
    assert not end.polls(1.0)
    end.received(STREAM, Heartbeat(2, 0, connecting=True), 2.0)
    assert end.polls(2.0)
    end.received(STREAM, Heartbeat(3, 0, connecting=False), 3.0)
    assert not end.polls(3.0)


# Seen failing if only a consumer's first message on it counts, and if every one counts as the
# first.
def test_a_producer_polls_for_a_limited_time_after_each_connect(end):
    end.received(STREAM, Heartbeat(1, 0, connecting=False), 1.0)
    end.received(STREAM, Heartbeat(2, 0, connecting=True), 100.0)
    end.received(STREAM, Heartbeat(3, 0, connecting=True), 101.0)
    assert end.polls(99.0 + POLL_S) and not end.polls(100.0 + POLL_S)


# Seen failing if `admitted` is never set.
def test_an_engine_that_admits_twice_raises_an_error(granted):
    granted.command(AdmittedCommand(SERIAL, 7, 0))
    with pytest.raises(EngineFault, match="admitted twice"):
        granted.command(AdmittedCommand(SERIAL, 7, 0))


# Seen failing if all hand-offs are counted for each stream.
def test_a_heartbeat_counts_the_hand_offs_of_its_own_stream(granted):
    granted.stream_up(2, CONSUMER + 1, 0.0)
    beats = {action.stream: action.message for action in granted.tick(1.0)}
    assert beats == {STREAM: Heartbeat(1, 1), 2: Heartbeat(1, 0)}


# Seen failing if only the first stream ends.
def test_all_streams_can_be_ended_at_once(granted):
    granted.stream_up(2, CONSUMER + 1, 0.0)
    granted.received(2, opening(HandoffId(CONSUMER + 1, 1, 1)), 0.0)
    actions = granted.end_streams("other weights")
    assert kinds(actions) == [EndStream, WithdrawPages, ClosedEvent] * 2
    assert not any(action.refused for action in actions if isinstance(action, EndStream))
    assert granted.num_open == 0


# Seen failing, with a KeyError, if a deadline outlives its hand-off, and if heartbeats outlive
# their stream.
def test_an_ended_hand_off_or_stream_has_no_deadline(end):
    end.received(STREAM, opening(budget_s=0.5), 0.0)
    end.received(STREAM, CancelHandoff(ID, "client"), 0.1)
    assert end.tick(0.5) == []
    end.stream_down(STREAM, "reset")
    assert end.next_deadline() is None
    assert end.tick(1e6) == []

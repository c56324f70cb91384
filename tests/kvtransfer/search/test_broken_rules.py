"""Rules 3, 5 and 8 of the hand-off are needed: the search without one of them breaks an invariant.

Two of them back up another rule, so a search without only these finds nothing:
    Rule 3: the producer sends Failed whenever it drops a hand-off (rule 2), on the stream on which
        it would answer Done or Grant, and before that answer. So the producer here breaks rule 2 as
        well, in the cases that rule 3 covers: before the grant and after the last Ready.
    Rule 5, an end of a stream drops only the hand-offs of that stream: a new stream of a consumer
        ends its old one (the other half) before the new one has any. So the producer here breaks
        both.
    Rule 8 binds the engines. The protocol end of a producer rejects early publications of an
        engine.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.messages import GrantHandoff, HandoffFailed, PagesReleased, ReadsDone
from kvtransfer.ports import OpenedEvent
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.protocol.progress import HandoffStatus
from tests.kvtransfer.search.search import PATIENT, search
from tests.kvtransfer.search.sides.hand_off import (
    Broken,
    Input,
    Output,
    Plan,
    SimulatedConsumer,
    SimulatedProducer,
)

pytestmark = pytest.mark.usefixtures("without_collector")

Break = Callable[[pytest.MonkeyPatch], None]
WAITS = "I3: something waits for ever"


def producer(side: type[SimulatedProducer]) -> Break:
    return lambda patch: patch.setattr("tests.kvtransfer.search.search.SimulatedProducer", side)


def consumer(side: type[SimulatedConsumer]) -> Break:
    return lambda patch: patch.setattr("tests.kvtransfer.search.search.SimulatedConsumer", side)


def of_end(name: str, broken: Callable[..., Any]) -> Break:
    return lambda patch: patch.setattr(ProducerEnd, name, broken)


# Rule 3


class LetsGoSilently(SimulatedProducer):
    """Sends no Failed for a hand-off that has no grant yet, or whose pages are all published."""

    def _react(self, given: Input) -> list[Output]:
        silent = False
        if given[0] == "fail":
            prompt = self.prompts[given[1]]
            silent = prompt.last_sent or not prompt.granted
        outputs = super()._react(given)
        return [] if silent else outputs


class IgnoresUnknownDone(LetsGoSilently):
    def _react(self, given: Input) -> list[Output]:
        return [each for each in super()._react(given) if not _answers(given, ReadsDone, each)]


class IgnoresUnknownGrant(LetsGoSilently):
    def _react(self, given: Input) -> list[Output]:
        return [each for each in super()._react(given) if not _answers(given, GrantHandoff, each)]


def _answers(given: Input, kind: type, output: Output) -> bool:
    """Return whether this output responds to a message of that kind about an unknown hand-off."""
    if given[0] != "message" or not isinstance(given[2], kind) or output[0] != "send":
        return False
    match output[2]:
        case PagesReleased(held=held):
            return not held
        case HandoffFailed():
            return True
    return False


# Rule 5

_stream_up = ProducerEnd.stream_up


def _keeps_the_old_stream(self: ProducerEnd, stream: int, consumer: int, now: float) -> list[Any]:
    old, self._streams = self._streams, {}
    actions = _stream_up(self, stream, consumer, now)
    self._streams.update(old)
    return actions


def _drops_all_of_its_consumer(self: ProducerEnd, stream: int, reason: str, **ended: bool) -> None:
    consumer = self._streams[stream].consumer
    for handoff in [each for each in self._handoffs.values() if each.id.instance == consumer]:
        self._drop(handoff, HandoffStatus.FAILED, reason)
    self._heartbeats.stop(stream)
    del self._streams[stream]


OLD_STREAM_STAYS = of_end("stream_up", _keeps_the_old_stream)
END_DROPS_ALL = of_end("_forget_stream", _drops_all_of_its_consumer)


# Rule 8


class ReservesPageByPage(SimulatedConsumer):
    """Keeps the pages that it has while it waits for the others."""

    def moves(self) -> list[Input]:
        moves = [move for move in super().moves() if move[0] != "grant"]
        for r, job in enumerate(self.jobs):
            if job.state == "open" and self._free(r):
                whole = len(job.pages) == self._num_pages(r)
                moves.append(("grant" if whole else "reserve", r))
        return moves

    def react(self, given: Input) -> list[Output]:
        if given[0] != "reserve":
            return super().react(given)
        job = self.jobs[given[1]]
        self.jobs[given[1]] = job._replace(pages=(*job.pages, self._free(given[1])[0]))
        return []

    def _free(self, r: int) -> tuple[int, ...]:
        pages = self.jobs[r].pages
        return pages if len(pages) == self._num_pages(r) else super()._free(r)


class AdmitsPageByPage(SimulatedProducer):
    """The same for a producer."""

    def _admit(self) -> list[Output]:
        return []

    def moves(self) -> list[Input]:
        waiting = [s for s, p in self.prompts.items() if p.granted and not p.admitted]
        return super().moves() + [
            ("reserve", serial) for serial in waiting if self._free(self.prompts[serial])
        ]

    def _react(self, given: Input) -> list[Output]:
        if given[0] != "reserve":
            return super()._react(given)
        prompt = self.prompts[given[1]]
        page = self._free(prompt)[0]
        self.cells[page] = "computing"
        pages = (*prompt.pages, page)
        whole = len(pages) == len(self.plan.places(prompt.num_tokens, prompt.start))
        self.prompts[given[1]] = prompt._replace(pages=pages, admitted=whole)
        return []


class PublishesBeforeTheGrant(SimulatedProducer):
    """Reserves the pages of a prompt and computes it as soon as it is opened."""

    def _take(self, event: Any) -> list[Output]:
        outputs = super()._take(event)
        if isinstance(event, OpenedEvent):
            opened = self.prompts[event.serial]
            self.prompts[event.serial] = opened._replace(granted=True)
            outputs += self._admit()
        return outputs


class AdmitsBeforeTheGrant(PublishesBeforeTheGrant):
    """Reserves as early, and publishes when it may."""

    def moves(self) -> list[Input]:
        return [
            move
            for move in super().moves()
            if move[0] != "publish" or self._end._handoffs[self.prompts[move[1]].id].ranges
        ]


LETS_GO = Plan((3,), (0,), only_faults=("fail",))
HALF_OPEN = Plan((3,), (0,), only_faults=("half-open",))
CUT = Plan((3,), (0,), only_faults=("cut",))
NARROW_CONSUMER = Plan((7, 7), (0, 0), consumer_pages=2)  # two pages each
NARROW_PRODUCER = Plan((7, 7), (0, 0), producer_pages=2)
ONE_PAGE_EACH = Plan((3, 3), (0, 0), consumer_pages=1, producer_pages=1)


def _faults(plan: Plan) -> int:
    """Only the named faults happen. A broken rule 8 needs none."""
    return int(bool(plan.only_faults))


@pytest.mark.parametrize(
    "plan, breaks, invariant",
    [
        pytest.param(LETS_GO, [producer(IgnoresUnknownDone)], WAITS, id="3-done-unanswered"),
        pytest.param(LETS_GO, [producer(IgnoresUnknownGrant)], WAITS, id="3-grant-unanswered"),
        pytest.param(HALF_OPEN, [OLD_STREAM_STAYS], WAITS, id="5-old-stream-stays"),
        pytest.param(CUT, [OLD_STREAM_STAYS, END_DROPS_ALL], WAITS, id="5-old-end-drops-the-new"),
        pytest.param(
            NARROW_CONSUMER, [consumer(ReservesPageByPage)], WAITS, id="8-consumer-piecemeal"
        ),
        pytest.param(
            NARROW_PRODUCER, [producer(AdmitsPageByPage)], WAITS, id="8-producer-piecemeal"
        ),
        pytest.param(
            ONE_PAGE_EACH, [producer(AdmitsBeforeTheGrant)], WAITS, id="8-ungranted-pages"
        ),
        pytest.param(
            ONE_PAGE_EACH,
            [producer(PublishesBeforeTheGrant)],
            "EngineFault: .* before its grant",
            id="8-ungranted-ready",
        ),
    ],
)
def test_the_search_finds_the_consequence_of_a_broken_rule(monkeypatch, plan, breaks, invariant):
    for each in breaks:
        each(monkeypatch)
    with pytest.raises(Broken, match=invariant):
        search(plan, PATIENT, faults=_faults(plan))


# The same searches with the rules. The two breaks alone are covered by another rule.
@pytest.mark.parametrize(
    "plan, breaks",
    [
        pytest.param(LETS_GO, [producer(LetsGoSilently)], id="3-makes-up-for-2"),
        pytest.param(CUT, [END_DROPS_ALL], id="5-one-half-makes-up-for-the-other"),
        pytest.param(HALF_OPEN, [], id="half-open"),
        pytest.param(NARROW_CONSUMER, [], id="narrow-consumer"),
        pytest.param(NARROW_PRODUCER, [], id="narrow-producer"),
        pytest.param(ONE_PAGE_EACH, [], id="one-page-each"),
    ],
)
def test_the_same_searches_find_nothing_with_the_rule(monkeypatch, plan, breaks):
    for each in breaks:
        each(monkeypatch)
    assert search(plan, PATIENT, faults=_faults(plan)).ends > 0

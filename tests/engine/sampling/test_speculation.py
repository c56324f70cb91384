"""Drafts change only the speed of responses, for any drafter and any end, and wherever their
pages are in between."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from common.request import NOT_PREDICTED
from engine.batch.batch import ForwardMode
from engine.batch.request import FinishReason, Request
from engine.speculative import Speculator
from tests.support.engine.engine_rig import BOTH, Rig
from tests.support.engine.fake_backend import VOCABULARY, foretold
from tests.support.models.drafters import KINDS, speculator

MAX_DRAFTS = 4
FORETELL = partial(foretold, vocabulary_size=VOCABULARY)


def guesses(kind: str, seed: int = 0) -> Speculator:
    return speculator(kind, FORETELL, VOCABULARY, MAX_DRAFTS, seed)


def verified(rig: Rig) -> list[int]:
    """Return drafts by step, for steps with drafts."""
    steps = [batch for batch in rig.runner.batches if batch.mode is ForwardMode.VERIFY]
    return [batch.num_tokens - len(batch.slots) for batch in steps]


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_responses_equal_those_without_drafts(kind, overlap):
    rig = Rig(speculator=guesses(kind), overlap_schedule=overlap, max_running_requests=40)
    for length in (1, 15, 16, 17, 40):
        rig.add([length] * length, max_tokens=length + 30)
    rig.complete()
    counters = rig.scheduler.counters()
    accepted, rejected = (counters[f"draft_tokens/{name}"] for name in ("accepted", "rejected"))
    assert accepted + rejected == sum(verified(rig)) > 0
    assert (accepted == 0) == (kind == "wrong")
    assert (rejected == 0) == (kind == "right")


@BOTH
def test_accepted_drafts_save_their_steps(overlap):
    """With overlap no turn is lost for them: a step is launched before the drafts of the
    previous step are verified."""
    rig = Rig(speculator=guesses("right"), overlap_schedule=overlap)
    rig.add([1, 2, 3], max_tokens=51)
    rig.complete()
    assert len(rig.runner.batches) == 1 + 10  # 5 tokens each, after the prompt's own
    assert rig.runner.done_at_launch == [max(0, step - overlap) for step in range(11)]


def test_a_rejected_draft_costs_no_step():
    rig = Rig(speculator=guesses("wrong"))
    rig.add([1, 2, 3], max_tokens=30)
    rig.complete()
    assert len(rig.runner.batches) == 30


def test_after_a_rejected_draft_the_step_in_flight_continues_at_the_right_position():
    """Each step gives at least one token, although it was launched as if all earlier drafts were
    accepted."""
    rig = Rig(speculator=guesses("random"))
    rig.add([5] * 20, max_tokens=200)
    rig.complete()
    assert any(batch.early is not None for batch in rig.runner.batches)
    counters = rig.scheduler.counters()
    assert len(rig.runner.batches) == 200 - counters["draft_tokens/accepted"]


# Seen failing if drafts are dropped when they differ from those in flight.
def test_a_row_has_drafts_in_the_step_after_a_wrong_one_too():
    """A draft is sometimes wrong by one token, and all later ones continue from that token. The
    next drafts know better, and replace those of the step in flight."""

    def foretell(tokens: list[int], count: int) -> list[int]:
        guessed = list(tokens)
        for place in range(len(tokens), len(tokens) + count):
            (token,) = FORETELL(guessed, 1)
            guessed.append((token + (place % 5 == 0)) % VOCABULARY)
        return guessed[len(tokens) :]

    rig = Rig(speculator=speculator("right", foretell, VOCABULARY, MAX_DRAFTS))
    rig.add([5] * 20, max_tokens=200)
    rig.complete()
    assert rig.scheduler.counters()["draft_tokens/rejected"] > 0
    modes = [batch.mode for batch in rig.runner.batches]
    assert set(modes[1 : -MAX_DRAFTS - 1]) == {ForwardMode.VERIFY}


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_ends_within_accepted_drafts(kind):
    """By EOS, by its own stop token, or by its length, at every position among them. Drafts after
    the end are not returned. Its last step writes only its own pages.

    Seen failing with steps that hold only the page of a row's last token.
    """
    rig = Rig(speculator=guesses(kind), eos=(5, 6, 7), max_running_requests=64)
    for first in range(30):
        answer = FORETELL([first, 1], 12)
        rig.add([first, 1], max_tokens=100)
        rig.add([first, 1], max_tokens=1 + first % 12, ignore_eos=True)
        rig.add([first, 1], max_tokens=100, ignore_eos=True, stop=(answer[first % 12],))
    rig.complete()


def test_a_request_cancelled_among_drafts_ends_with_its_step():
    rig = Rig(speculator=guesses("right"))
    request, other = rig.add([1, 2], max_tokens=100), rig.add([2, 1], max_tokens=40)
    rig.step(4)
    rig.abort(request)
    rig.run()
    assert rig.finished[request.key].reason is FinishReason.ABORT
    told = rig.tokens[request.key]
    assert told == rig.expected(request)[0][: len(told)]
    assert rig.tokens[other.key] == rig.expected(other)[0]
    rig.assert_at_rest()


@pytest.mark.parametrize("windows", [(None, 16), (None, 20, 100)])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_move_on_with_accepted_tokens(kind, windows):
    rig = Rig(speculator=guesses(kind), windows=windows, num_pages=200)
    for length in (3, 16, 50):
        rig.add([length] * length, max_tokens=120)
    rig.complete()


@pytest.mark.parametrize("state_pages", [0, 2])
@pytest.mark.parametrize("swap_pages", [0, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_with_drafts_are_retracted_and_return(kind, swap_pages, state_pages):
    """With the state after the accepted tokens, if the model has states."""
    rig = Rig(
        speculator=guesses(kind),
        num_pages=8 + 3 * state_pages,
        state_pages=state_pages,
        swap_pages=swap_pages,
        max_running_requests=24,
        new_token_ratio=0.1,
        min_new_token_ratio=0.1,
    )
    for first in range(6):
        rig.add([first] * 14, max_tokens=60)
    rig.complete()
    assert rig.scheduler.counters()["retractions"] > 0
    assert verified(rig)


# Seen failing if growth is counted from the pages that its tokens need: it had one more, for drafts
# that were rejected after its retraction, and so waited for more pages than exist.
@pytest.mark.parametrize("state_pages", [0, 2])
@pytest.mark.parametrize("num_tokens", [46, 47, 48])
def test_a_request_that_had_all_pages_with_its_drafts_returns(num_tokens, state_pages):
    rig = Rig(
        speculator=guesses("wrong"),
        num_pages=4 + state_pages,
        state_pages=state_pages,
        vandal=False,
        new_token_ratio=0.9,
        preemption_threshold=5,
    )
    first = rig.add([1] * 40, max_tokens=24)
    rig.run_until(lambda: 40 + len(rig.tokens[first.key]) >= num_tokens)
    rig.add([2] * 16, max_tokens=4, priority=5)
    rig.complete()
    assert sum(rig.scheduler.counters()[f"preempted/{n}"] for n in ("low", "normal", "high")) == 1


def test_no_request_is_retracted_for_a_draft():
    """One has no page for its drafts until the other one has ended."""
    bold = {"new_token_ratio": 0.01, "min_new_token_ratio": 0.01}
    rig = Rig(speculator=guesses("right"), num_pages=4, vandal=False, **bold)
    rig.add([1] * 28, max_tokens=30)
    rig.add([2] * 28, max_tokens=3)
    rig.complete()
    assert rig.scheduler.counters()["retractions"] == 0


def test_a_step_samples_at_most_as_many_tokens_as_there_are_slots():
    rig = Rig(speculator=guesses("right"), max_running_requests=6)
    for first in range(4):
        rig.add([first] * 5, max_tokens=30)
    rig.complete()
    assert max(batch.num_tokens for batch in rig.runner.batches[1:]) == 6


def test_a_prompt_beside_rows_that_may_move_back_changes_nothing():
    rig = Rig(speculator=guesses("random"), chunked_prefill_tokens=16)
    rig.add([3] * 10, max_tokens=200)
    for turn in range(6):
        rig.step(6)
        rig.add([turn] * 40, max_tokens=20)
    rig.complete()
    modes = {batch.mode for batch in rig.runner.batches if batch.early is not None}
    assert ForwardMode.MIXED in modes


def test_a_request_that_must_run_alone_has_no_drafts():
    rig = Rig(speculator=guesses("right"))
    rig.add([1, 2, 3], max_tokens=20, suspect=True)
    rig.complete()


def test_a_stopped_request_continues_with_all_accepted_tokens():
    """A request that migrates to another node is in this state: it has no step in flight."""
    rig = Rig(speculator=guesses("random"))
    request = rig.add([4] * 30, max_tokens=100)
    while len(rig.tokens[request.key]) < 100:
        rig.step(3)
        if request.slot is None or not rig.scheduler.pause(request):
            continue
        rig.run_until(lambda: rig.in_flight is None)
        if request.slot is None:
            break  # it has ended before
        stopped = rig.scheduler.take_paused(request)
        assert stopped is not None
        told = [*request.token_ids.tolist(), *rig.tokens[request.key]]
        assert stopped.token_ids.tolist() == told
        kv = rig.runner.kv[stopped.holding.tables[0]].ravel()[: len(told) - 1]
        assert kv.tolist() == told[:-1]
        rig.scheduler.resume(request)
    rig.complete()


def _predicting(rig: Rig, prediction: Callable[[list[int]], list[int]], **options: Any) -> Request:
    """Return a request whose prediction is `prediction` of its response."""
    prompt = [*range(20)]
    return rig.add(prompt, 60, prediction=prediction(FORETELL(prompt, 60)), **options)


def _clueless() -> Speculator:
    return speculator("right", lambda tokens, count: [], VOCABULARY, MAX_DRAFTS)


@BOTH
def test_a_correctly_predicted_response_takes_few_steps(overlap):
    rig = Rig(speculator=_clueless(), overlap_schedule=overlap)
    request = _predicting(rig, list)
    other = rig.add([1, 2, 3], 60)
    rig.complete()
    told = rig.predicted[request.key]
    assert told.accepted >= 60 * MAX_DRAFTS // (MAX_DRAFTS + 1) - MAX_DRAFTS
    counters = rig.scheduler.counters()
    assert (told.accepted, told.rejected) == tuple(
        counters[f"prediction_tokens/{outcome}"] for outcome in ("accepted", "rejected")
    )
    assert told.accepted + told.rejected == sum(verified(rig))
    assert other.key not in rig.predicted


def test_a_partly_wrong_prediction_costs_no_token():
    rig = Rig(speculator=_clueless())
    edited = _predicting(rig, lambda answer: [*answer[:20], 1, *answer[22:]])
    alien = _predicting(rig, lambda answer: [7] * 40)
    rig.complete()
    assert min(rig.predicted[edited.key].accepted, rig.predicted[edited.key].rejected) > 0
    assert alien.key not in rig.predicted or rig.predicted[alien.key].accepted == 0


def test_drafts_of_other_drafters_do_not_count_as_predicted():
    rig = Rig(speculator=guesses("right"))
    request = _predicting(rig, lambda answer: [VOCABULARY - 1] * 3)
    rig.complete()
    assert rig.scheduler.counters()["draft_tokens/accepted"] > 0
    assert rig.predicted.get(request.key, NOT_PREDICTED).accepted == 0


def test_a_prediction_is_kept_while_its_request_is_retracted():
    rig = Rig(
        speculator=_clueless(),
        num_pages=8,
        max_running_requests=24,
        new_token_ratio=0.1,
        min_new_token_ratio=0.1,
    )
    asked = [rig.add([n] * 14, 60, prediction=FORETELL([n] * 14, 60)) for n in range(6)]
    rig.complete()
    assert rig.scheduler.counters()["retractions"] > 0
    assert all(rig.predicted[request.key].accepted > 20 for request in asked)

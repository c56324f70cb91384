"""Drafters, and the most profitable number of drafts."""

import random

import numpy as np
import pytest

from common.config import SpeculativeConfig
from common.requests.namespace import as_bytes
from engine.batch.request import Request
from engine.speculative import (
    LONGEST_MATCH,
    AdaptiveDrafts,
    NgramDrafter,
    Predictions,
    Speculator,
    StepCosts,
)
from tests.support.specs import make_request

SLOT = np.zeros(1, np.intp)


def propose(tokens, count=4, min_match=2):
    return NgramDrafter(min_match).propose(np.array(tokens, np.int32), count).tolist()


def test_another_text_is_searched_and_followed_to_its_end():
    text = np.array([9, 1, 2, 3, 4], np.int32)
    drafter = NgramDrafter(2)
    for tokens, found in (([1, 2], [3, 4]), ([5, 3, 4], []), ([2], []), ([9, 2], [])):
        assert drafter.found_in(text, np.array(tokens, np.int32), 4).tolist() == found
    assert NgramDrafter(1).found_in(text, np.array([2], np.int32), 1).tolist() == [3]


def _expecting(prediction: list[int]) -> Request:
    return make_request([8, 7, 6], prediction=as_bytes(prediction))


def test_the_first_tokens_of_a_response_are_found_in_its_prediction():
    predictions = Predictions(min_match=3)
    predictions.acquired(4, _expecting([1, 2, 3]))
    tokens = np.array([8, 7, 6, 1], np.int32)
    assert predictions.propose(4, tokens, 5).tolist() == [2, 3]
    assert predictions.propose(5, tokens, 5).tolist() == []
    predictions.acquired(4, _expecting([]))
    assert predictions.propose(4, tokens, 5).tolist() == []


def _plainly(tokens: list[int], count: int, min_match: int) -> list[int]:
    """Search position by position."""
    best, place = 0, None
    for end in range(1, len(tokens)):
        alike = 0
        while alike < min(end, LONGEST_MATCH) and tokens[end - 1 - alike] == tokens[-1 - alike]:
            alike += 1
        if alike >= max(best, min_match):
            best, place = alike, end
    if place is None:
        return []
    followed = tokens[place:]
    return [followed[number % len(followed)] for number in range(count)]


@pytest.mark.parametrize("min_match", [1, 2, 3, 5])
def test_proposals_equal_those_of_a_plain_search(min_match):
    rng = random.Random(min_match)
    for _ in range(300):
        tokens = [rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.randrange(1, 60))]
        assert propose(tokens, 5, min_match) == _plainly(tokens, 5, min_match)


def test_the_cost_of_a_step_and_of_its_tokens_are_distinguished():
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(500):
        tokens = rng.choice((1, 2, 5))
        costs.took(tokens, 0.010 + 0.002 * tokens + rng.uniform(-1e-4, 1e-4))
    assert costs.share(1) == pytest.approx(2 / 12, abs=0.02)
    assert costs.share(16) == pytest.approx(32 / 42, abs=0.05)


def test_without_measurements_or_with_equal_steps_the_cost_of_a_token_is_assumed():
    costs = StepCosts()
    assert costs.share(1) == pytest.approx(0.15)
    assert costs.share(16) == pytest.approx(2.4 / 3.25)
    for _ in range(500):
        costs.took(16, 0.05)
    assert costs.share(16) == pytest.approx(2.4 / 3.25)


def test_the_cost_of_a_token_is_kept_while_all_steps_are_alike():
    """This is the case of a saturated batch without drafts."""
    costs = StepCosts()
    for tokens in (16, 16, 26, 16):
        costs.took(tokens, 0.002 * tokens)
    known = costs.share(16)
    assert known > 0.9
    for _ in range(1000):
        costs.took(16, 0.032)
    assert costs.share(16) == pytest.approx(known, abs=0.02)


def _tokens_of(policy: AdaptiveDrafts, of_step: float, of_token: float, stands: float) -> float:
    """Return tokens per second of 16 requests relative to those without drafts. Every request
    has as many drafts as allowed, each accepted with that probability."""
    rng, slots = np.random.default_rng(0), np.arange(16)
    for slot in slots.tolist():
        policy.acquired(slot)
    seconds = tokens = 0.0
    for _ in range(400):
        drafted = policy.limits(slots, 16)
        accepted = np.cumprod(rng.random((16, 7)) < stands, axis=1).sum(axis=1)
        accepted = np.minimum(accepted, drafted).astype(np.int32)
        took = of_step + of_token * (16 + int(drafted.sum()))
        policy.took(16 + int(drafted.sum()), took)
        has = np.flatnonzero(drafted)
        if len(has):
            policy.verified(slots[has], drafted[has], accepted[has])
        seconds, tokens = seconds + took, tokens + 16 + int(accepted.sum())
    return tokens / seconds * (of_step + 16 * of_token) / 16


@pytest.mark.parametrize("stands", [0.0, 0.3, 0.7])
def test_a_large_compute_bound_batch_loses_little_by_trials(stands):
    assert _tokens_of(AdaptiveDrafts(16, 7), of_step=1, of_token=10, stands=stands) > 0.98


def test_a_large_memory_bound_batch_finds_out_that_drafts_pay():
    assert _tokens_of(AdaptiveDrafts(16, 7), of_step=100, of_token=0.1, stands=0.8) > 2


def _policy(of_step: float, of_token: float) -> AdaptiveDrafts:
    policy, rng = AdaptiveDrafts(1, 7), random.Random(0)
    for _ in range(500):
        tokens = rng.randint(1, 32)
        policy.took(tokens, of_step + of_token * tokens)
    policy.acquired(0)
    return policy


def _limit(policy: AdaptiveDrafts, num_rows: int) -> int:
    (limit,) = policy.limits(SLOT, num_rows).tolist()
    return limit


def _verified(policy: AdaptiveDrafts, drafted: int, accepted: int, times: int = 20) -> None:
    for _ in range(times):
        policy.verified(SLOT, np.array([drafted], np.int32), np.array([accepted], np.int32))


def test_an_accurate_drafter_gets_the_most_drafts_and_a_wrong_one_none():
    policy = _policy(of_step=10, of_token=1)
    _verified(policy, 4, 4)
    assert _limit(policy, 1) == 7
    _verified(policy, 4, 0)
    assert _limit(policy, 1) == 0


def test_a_larger_batch_requires_more_likely_drafts():
    policy = _policy(of_step=10, of_token=1)
    limits = [_limit(policy, rows) for rows in (1, 4, 16, 64, 256)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > 0 and limits[-1] == 0


def test_if_a_step_costs_only_its_tokens_no_draft_pays():
    policy = _policy(of_step=0, of_token=1)
    _verified(policy, 4, 3)
    assert _limit(policy, 1) == 0


def test_unprofitable_drafts_are_tried_again_at_intervals():
    policy = _policy(of_step=10, of_token=1)
    _verified(policy, 4, 0)
    turns = [_limit(policy, 1) for _ in range(1000)]
    assert turns[0] == 0 and turns[-1] > 0


def test_a_new_request_is_expected_to_be_like_earlier_ones():
    policy = _policy(of_step=10, of_token=10)
    policy.acquired(0)
    assert _limit(policy, 1) > 0
    _verified(policy, 4, 0, times=200)
    policy.acquired(0)
    assert _limit(policy, 1) == 0


def test_there_are_no_drafts_unless_a_drafter_is_configured():
    assert Speculator.of(SpeculativeConfig(), 8) is None
    assert Speculator.of(SpeculativeConfig(method="ngram"), 8) is not None

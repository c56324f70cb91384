"""Threads that share compiled work: each piece is done once, for any number of concurrent
callers."""

import threading

import pytest
import torch

from kernels.cpu.operators import Operators

DEADLINE_S = 120.0


@pytest.fixture
def alone(teams) -> Operators:
    return teams[0]


@pytest.fixture
def crowd(teams) -> Operators:
    return teams[-1]


def activations(operators: Operators) -> torch.Tensor:
    x = torch.linspace(-4, 4, 64 * 4096).view(64, 4096)
    return operators.act_and_mul(x, "silu")


def test_many_threads_give_the_result_of_one(alone, crowd):
    expected = activations(alone)
    for _ in range(200):
        assert torch.equal(activations(crowd), expected)


def test_concurrent_callers_get_their_own_results(alone, crowd):
    expected, seen = activations(alone), []

    def ask():
        seen.extend(torch.equal(activations(crowd), expected) for _ in range(50))

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert len(seen) == 200 and all(seen)


def test_a_team_works_again_after_sleep(alone, crowd):
    activations(crowd)
    threading.Event().wait(0.05)  # workers sleep after a tenth of a millisecond
    assert torch.equal(activations(crowd), activations(alone))

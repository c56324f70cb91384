"""Threads that share compiled work: each piece is done once, whoever asks, and how many at once."""

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


def test_many_threads_give_what_one_gives(alone, crowd):
    expected = activations(alone)
    for _ in range(200):
        assert torch.equal(activations(crowd), expected)


def test_callers_that_ask_at_once_get_what_each_asked_for(alone, crowd):
    expected, seen = activations(alone), []

    def ask():
        seen.extend(torch.equal(activations(crowd), expected) for _ in range(50))

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert len(seen) == 200 and all(seen)


def test_a_team_that_has_slept_works_again(alone, crowd):
    activations(crowd)
    threading.Event().wait(0.05)  # workers sleep after a tenth of a millisecond
    assert torch.equal(activations(crowd), activations(alone))

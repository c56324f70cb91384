"""Threads that share compiled work: each piece is done once, whoever asks, and how many at once."""

import threading

import pytest
import torch

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import paged_attention, plan_attention
from kernels.cpu.compiler import cache_directory, library
from kernels.cpu.operators import Operators

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def alone(operators) -> Operators:
    """In one thread; there is a compiler, or this is skipped."""
    return Operators(library(cache_directory(), lambda: None), threads=1)


@pytest.fixture(scope="module")
def crowd(alone) -> Operators:
    """In more threads than this machine may have cores."""
    return Operators(library(cache_directory(), lambda: None), threads=5)


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


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_query_sees_gives_the_same_to_the_bit_in_any_chunk(
    crowd, monkeypatch, dtype, window
):
    monkeypatch.setattr("kernels.device.compiled_for", lambda where: crowd)
    length, page = 300, 16
    kv = torch.randn(-(-length // page), 2, 2, page, 32).to(dtype)
    q = torch.randn(length, 6, 32).to(dtype)

    def attended(start: int, end: int) -> torch.Tensor:
        rows = AttentionRows(
            torch.arange(kv.shape[0], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            num_tokens=end - start,
            num_decodes=0,
        )
        plan = plan_attention(rows, kv, AttentionKind(6, window))
        return paged_attention(q[start:end], kv, plan, Scoring(0.2))

    whole = attended(0, length)
    for start, end in ((0, 1), (0, 100), (37, 230), (100, 101), (128, 300)):
        assert torch.equal(attended(start, end), whole[start:end])

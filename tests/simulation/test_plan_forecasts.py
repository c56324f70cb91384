"""The closed forms of `baton plan` beside queues that are simulated step by step."""

import random
from collections import deque

import pytest

from simulation.cost import StepCost, StepShape
from simulation.plan.forecasts import NodeSteps, colocated, disaggregated
from simulation.plan.traffic import Traffic

INPUT, OUTPUT, CHUNK = 2000, 100, 512
COST = StepCost.of("h100", "llama-3-8b")


def arrivals(rate, count=800):
    rng, at = random.Random(1), 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        yield at


def p90(values):
    return sorted(values)[9 * len(values) // 10]


def node(due, chunk):
    """One node that computes prompts in chunks beside its decode rows, or prompts of no tokens.

    Returns the TTFTs and the TPOTs.
    """
    due, waiting, rows, now = deque(due), deque(), [], 0.0
    ttfts, tpots = [], []
    while due or waiting or rows:
        if not waiting and not rows:
            now = max(now, due[0])
        while due and due[0] <= now:
            waiting.append([due.popleft(), INPUT if chunk else 0])
        left, news, contexts, begun = chunk, [], [], []
        for prompt in waiting:
            new = min(left, prompt[1])
            left, prompt[1] = left - new, prompt[1] - new
            if new:
                news.append(new)
                contexts.append(INPUT - prompt[1])
            if not prompt[1]:
                begun.append(prompt)
        decoding = tuple(INPUT + tokens for _, tokens in rows)
        if decoding or news:
            now += COST.step_s(
                StepShape((1,) * len(decoding) + tuple(news), decoding + tuple(contexts))
            )
        rows = [(first, tokens + 1) for first, tokens in rows]
        tpots += [(now - first) / (OUTPUT - 1) for first, tokens in rows if tokens == OUTPUT]
        rows = [(first, tokens) for first, tokens in rows if tokens < OUTPUT]
        for prompt in begun:
            waiting.remove(prompt)
            ttfts.append(now - prompt[0])
            rows.append((now, 1))
    return ttfts, tpots


@pytest.mark.parametrize("rate", [5.0, 12.0])
def test_colocated_nodes_are_as_fast_as_their_steps(rate):
    traffic = Traffic.uniform(rate, INPUT, OUTPUT)
    forecast = colocated(traffic, NodeSteps(COST, traffic), 1, CHUNK)
    ttfts, tpots = node(arrivals(rate), CHUNK)
    assert forecast.ttft == pytest.approx(p90(ttfts), rel=0.25)
    assert forecast.tpot == pytest.approx(p90(tpots), rel=0.1)


def test_waiting_prompts_share_steps():
    traffic = Traffic.uniform(200.0, 100, 10)
    steps = NodeSteps(COST, traffic)
    assert 1 / steps.prompts[0] < traffic.rate  # one prompt at a time would be too slow
    forecast = disaggregated(traffic, steps, steps, (1, 1), "rdma400")
    assert not forecast.exhausted and forecast.ttft < 10 * steps.prompts[0]


@pytest.mark.parametrize("rate", [8.0, 16.0])
def test_a_prefill_and_a_decode_node_are_as_fast_as_their_steps(rate):
    traffic = Traffic.uniform(rate, INPUT, OUTPUT)
    steps = NodeSteps(COST, traffic)
    forecast = disaggregated(traffic, steps, steps, (1, 1), "rdma400")
    now, first, ttfts, waiting = 0.0, [], [], deque(arrivals(rate))
    while waiting:
        now = max(now, waiting[0])
        batch = [due for due in waiting if due <= now][: steps.max_batch]
        now += COST.step_s(StepShape((INPUT,) * len(batch), (INPUT,) * len(batch)))
        ttfts += [now - waiting.popleft() for _ in batch]
        first += [now] * len(batch)
    assert forecast.ttft == pytest.approx(p90(ttfts), rel=0.25)
    assert forecast.tpot == pytest.approx(p90(node(first, 0)[1]), rel=0.1)

"""Preemption on a decode node, with real forwards and real copies."""

import pytest

from tests.pair.rig import PairRig, Size

SMALL = (Size(num_pages=10, prefix_cache=False),)
PREEMPTS = {"preemption_threshold": 10, "new_token_ratio": 0.02, "min_new_token_ratio": 0.01}
LOW, HIGH = [3] * 70, [4, *range(60)]


# Seen failing if the request of lowest priority keeps its place, either way.
@pytest.mark.parametrize("way", ["hand-off", "prompt"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_an_urgent_request_preempts_another_and_both_complete(model, architecture, way):
    known = model(architecture)
    producers = [0] if way == "hand-off" else []
    size = known.tables(16).pages_for(112)
    nodes = [Size(num_pages=size, prefix_cache=False)]
    with PairRig(known.loaded, decode=nodes, **PREEMPTS) as rig:
        (node,) = rig.decode
        low = rig.ask(LOW, 40, prefill=producers)
        rig.until(lambda: len(low.tokens) > 3, "the first runs")
        high = rig.ask(HIGH, 20, prefill=producers, priority=50)
        rig.run(high)
        assert low.ended is None
        assert node.count("preempted/normal") == 1
        rig.run()
        known.check(low, high)


def test_an_urgent_retracted_request_returns_first(known):
    nodes = [Size(num_pages=8, prefix_cache=False)]
    with PairRig(known.loaded, decode=nodes) as rig:
        (node,) = rig.decode
        running = rig.ask(LOW, 20)
        rig.until(lambda: running.tokens, "the first runs")
        low = rig.ask([5] * 90, 4, priority=-1)
        rig.until(lambda: node.queue("prealloc") == 1, "it waits", node)
        high = rig.ask([6] * 90, 4, priority=50)
        rig.until(lambda: node.queue("prealloc") == 2, "both wait", node)
        waiting = node.role.waiting_by_class()
        assert (waiting["low"], waiting["normal"], waiting["high"]) == (1, 0, 1)
        rig.run(high)
        assert running.ended is not None and not low.tokens
        rig.run()
        assert node.count("preempted/normal") == 0
        assert low.tokens == known.greedy([5] * 90, 4)


def test_a_preempted_request_can_be_cancelled(known):
    with PairRig(known.loaded, decode=SMALL, **PREEMPTS) as rig:
        (node,) = rig.decode
        low = rig.ask(LOW, 60)
        rig.until(lambda: len(low.tokens) > 3, "the first runs")
        high = rig.ask([4] * 100, 20, priority=50)
        rig.until(lambda: node.queue("retracted"), "it is away")
        rig.cancel(low)
        rig.run()
        assert high.tokens == known.greedy([4] * 100, 20)

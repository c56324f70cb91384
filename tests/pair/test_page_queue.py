"""Hand-offs and local prefills wait for the same pages, as if in one queue."""

import pytest

from engine.scheduler import arrivals
from node.messages import AbortRequests
from tests.pair.rig import Asked, PairRig, Size

LARGE = [n * 7 % 300 for n in range(100)]  # seven of eight pages
SMALL = [5] * 20
SMALL_NODE = [Size(num_pages=8, prefix_cache=False)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Set the time after which a waiting request is no longer overtaken to 0."""
    monkeypatch.setattr(arrivals, "SKIP_AHEAD_S", 0.0)


def _ask_small(rig: PairRig, number: int, **options) -> Asked:
    """Submit small requests that do not end at the same time."""
    return rig.ask([number, *SMALL], 30 if number else 15, **options)


# Seen failing with separate queues, either way: more than forty small requests overtook it.
@pytest.mark.parametrize("large", ["prompt", "hand-off"])
def test_small_requests_of_one_queue_do_not_starve_a_large_one_of_the_other(known, large):
    """At any time, two small requests of the other kind run and two wait."""
    here, away = {"prefill": []}, {"prefill": [0]}
    ways = (here, away) if large == "prompt" else (away, here)
    with PairRig(known.loaded, decode=SMALL_NODE) as rig:
        small = [_ask_small(rig, number, **ways[1]) for number in range(2)]
        rig.until(lambda: all(one.tokens for one in small), "the first two run")
        waiting = rig.ask(LARGE, 2, **ways[0])
        rig.until(lambda: _waits(rig), "the large one waits")
        for number in range(2, 44):
            if waiting.tokens:
                break
            small.append(_ask_small(rig, number, **ways[1]))
            rig.until(
                lambda: waiting.tokens or sum(one.ended is None for one in small) < 4,
                "one of them ends",
            )
        assert waiting.tokens and sum(bool(one.tokens) for one in small) <= 4
        rig.run()
        assert waiting.tokens == known.greedy(LARGE, 2)


def _waits(rig: PairRig) -> bool:
    (node,) = rig.decode
    return bool(node.queue("waiting") or node.queue("prealloc"))


# Seen failing, either way, if requests start again at the end of the queue.
@pytest.mark.parametrize("goes_on", ["elsewhere", "here"])
def test_a_request_that_has_lost_its_hand_off_keeps_its_queue_position(known, goes_on):
    with PairRig(known.loaded, prefill=[Size(), Size()], decode=SMALL_NODE) as rig:
        running = rig.ask(LARGE[:60], 60, prefill=[])
        rig.until(lambda: running.tokens, "it runs")
        first = _ask_small(rig, 1, prefill=[0, 1], request_id="first")
        second = rig.ask(LARGE, 2, prefill=[1])
        third = _ask_small(rig, 3, prefill=[1])
        (node,) = rig.decode
        # From here until the loss the first request's pages must not be released.
        rig.until(lambda: node.queue("prealloc") == 3, "three wait", node)
        rig.until(lambda: rig.prefill[0].queue("bootstrap"), "its producer knows", *rig.prefill)
        if goes_on == "here":
            rig.command(rig.prefill[0], AbortRequests("first"))
        else:
            rig.wires.cut(rig.prefill[0].front, node.front)
        rig.until_news(
            lambda: node.count("handoffs_failed"), "the first has lost its hand-off", node
        )
        assert not running.ended
        rig.run(first)
        assert running.ended and not second.tokens and not third.tokens
        rig.wires.heal()
        rig.until_paired()
        rig.run()
        # A lost attempt no longer counts as waiting for pages.
        assert not node.role._queues.prealloc.backlog._line

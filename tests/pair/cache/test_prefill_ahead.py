"""Prompts computed before their Grant, while the decode node has no free pages for them."""

from typing import Any

import pytest

from common.pausing import PauseMode
from decode_node.handoffs import IncomingHandoffs
from node.messages import ContinueGeneration, PauseGeneration
from tests.pair.conftest import Known
from tests.pair.features.test_pooled_calls import call
from tests.pair.rig import Asked, PairRig, Size, prompt

WAITING = prompt(400, 2)
ROOM = Size(num_pages=256)


class _Grants:
    """Grants of decode nodes, withheld until `release`, as if all pages were in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._withheld = True
        grant = IncomingHandoffs.grant

        def granted(handoffs: IncomingHandoffs, now: float) -> None:
            if not self._withheld:
                grant(handoffs, now)

        monkeypatch.setattr(IncomingHandoffs, "grant", granted)

    def release(self) -> None:
        self._withheld = False


@pytest.fixture
def grants(monkeypatch: pytest.MonkeyPatch) -> _Grants:
    return _Grants(monkeypatch)


def _rig(known: Known, prefill: Size = ROOM) -> PairRig:
    return PairRig(known.loaded, prefill=[prefill], decode=[ROOM])


def _until_it_waits(rig: PairRig, **options: Any) -> Asked:
    """Return a request that waits for its Grant."""
    waiting = rig.ask(WAITING, 20, **options)
    (node,) = rig.prefill
    rig.until(lambda: node.queue("bootstrap"), "it waits for its Grant")
    return waiting


def _until_ahead(rig: PairRig, num_tokens: int) -> None:
    """Give turns to the prefill node alone, so that no Grant arrives."""
    (node,) = rig.prefill
    rig.until(lambda: node.count("tokens_ahead") >= num_tokens, "it computes ahead", node)


# Seen failing without computation ahead, and if its tokens count as cached.
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_a_prompt_is_computed_while_it_waits_for_pages(model, grants, architecture):
    known = model(architecture)
    with _rig(known) as rig:
        (node,) = rig.prefill
        waiting = _until_it_waits(rig)
        _until_ahead(rig, len(WAITING))
        rig.until(lambda: not node.role._ahead.current, "it is computed")
        assert node.pages("request") == node.pages("step") == 0
        assert node.pages("cache") >= known.tables(16).pages_for(len(WAITING)) // 2
        computed = node.count("prompt_tokens") - node.count("cached_tokens")
        grants.release()
        rig.run()
        known.check(waiting)
        assert waiting.cached_tokens == 0
        assert node.count("tokens_ahead") == computed == len(WAITING)
        assert node.count("prompt_tokens") - node.count("cached_tokens") - computed <= 16


# Seen failing without the stop: the prompt is computed to its end.
def test_a_grant_uses_the_chunks_computed_ahead(known, grants):
    with _rig(known) as rig:
        (node,) = rig.prefill
        waiting = _until_it_waits(rig)
        _until_ahead(rig, 64)
        grants.release()
        rig.until_news(lambda: not node.queue("bootstrap"), "it is granted", node)
        rig.run()
        assert 64 <= node.count("tokens_ahead") < len(WAITING)
        assert node.count("cached_tokens") >= node.count("tokens_ahead")  # whole pages of chunks
        assert waiting.cached_tokens == 0
        known.check(waiting)


# Seen failing without the stop: computation continues to the end before the other prompt gets its
# vector.
def test_granted_prompts_precede_computation_ahead(known, grants):
    with _rig(known) as rig:
        (node,) = rig.prefill
        _until_it_waits(rig)
        _until_ahead(rig, 64)
        call(node, 1, [prompt(20, 5)])
        rig.until(lambda: node.router.pooled, "the other one has its vector", node)
        assert node.count("tokens_ahead") < len(WAITING)
        rig.until(lambda: node.role._ahead.current, "it goes on", node)
        rig.until(lambda: not node.role._ahead.current, "it is computed", node)
        grants.release()
        rig.run()
        known.check(*rig.asked)


@pytest.mark.parametrize("end", ["cancelled", "prefill node paused"])
def test_computation_ahead_stops_when_its_request_ends(known, grants, end):
    with _rig(known) as rig:
        (node,) = rig.prefill
        waiting = _until_it_waits(rig)
        _until_ahead(rig, 64)
        if end == "cancelled":
            rig.cancel(waiting)
        else:
            rig.command(node, PauseGeneration(PauseMode.ABORT))
        rig.until(lambda: not node.role.busy, "nothing of it is left", node, *rig.decode)
        assert node.count("tokens_ahead") < len(WAITING)
        rig.command(node, ContinueGeneration())
        grants.release()
        rig.run()


def test_at_most_half_the_pool_is_computed_ahead(known, grants):
    with _rig(known, Size(num_pages=90)) as rig:
        (node,) = rig.prefill
        _until_it_waits(rig)
        other = rig.ask(prompt(400, 3), 2)
        small = rig.ask(prompt(100, 4), 2)
        rig.until(lambda: node.queue("bootstrap") == 3, "all wait")
        _until_ahead(rig, len(WAITING) + 100)
        rig.until(lambda: not node.role._ahead.current, "nothing more is computed", node)
        assert node.count("tokens_ahead") == len(WAITING) + 100
        grants.release()
        rig.run()
        known.check(other, small)


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"engine_crashes": 1}])
def test_computation_ahead_evicts_no_page_in_use(known, grants, options):
    with _rig(known) as rig:
        (node,) = rig.prefill
        _until_it_waits(rig, **options)
        rig.let_time_pass(rig.prefill[0].role._may_begin_ahead)
        for _ in range(4):
            rig.turn()
        assert node.count("tokens_ahead") == 0
        grants.release()
        rig.run()

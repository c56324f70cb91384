"""Layers that keep windows, states or latents instead of all keys and values.

Only live pages are transferred. They are retracted and restored with their request.
"""

import pytest

from kvtransfer.messages import PagesReady
from tests.pair.rig import PairRig, Size, prompt
from tests.support.models.checkpoints import LATENT_ARCHITECTURES

LONG = 150
ROOM = Size(num_pages=128)
WINDOW = 24  # of these tests' gemma3_text: two pages, and three at a page boundary
LENGTHS = {
    "gemma3_text": (1, 16, WINDOW, 48, 300),
    "qwen3_next": (1, 48, LONG),
    "qwen3_5_text": (3, 70),
    "qwen3_5_moe_text": (3, 70),
    **dict.fromkeys(LATENT_ARCHITECTURES, (1, 16, 17, LONG)),
}
# deepseek_v3 and qwen3_5_text have the same caches and are quick.
ALIKE = {"deepseek_v2": pytest.mark.long, "qwen3_5_moe_text": pytest.mark.long}


def each(*architectures: str) -> list:
    return [pytest.param(name, marks=ALIKE.get(name, ())) for name in architectures]


KINDS = pytest.mark.parametrize(
    "architecture", each("gemma3_text", "qwen3_next", *LATENT_ARCHITECTURES)
)


def handed(rig: PairRig) -> int:
    return sum(len(ready.pages) for ready in rig.wires.said(PagesReady))


@pytest.mark.parametrize("architecture", each(*LENGTHS))
def test_responses_are_those_of_transformers_and_only_live_pages_are_transferred(
    model, architecture
):
    known, lengths = model(architecture), LENGTHS[architecture]
    tables = known.tables(16)
    assert tables.windows[1:] == (WINDOW,) * 3 or architecture != "gemma3_text"
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM], chunked_prefill_tokens=32) as rig:
        asked = [rig.ask(prompt(length, length), 30) for length in lengths]
        rig.run()
        known.check(*asked)
        assert handed(rig) == sum(tables.pages_for(length) for length in lengths)
        for ready in rig.wires.said(PagesReady):
            if ready.last and tables.state_pages:  # a state goes with the last pages
                pages_of_tokens = tables.num_pages(ready.end) - ready.start // 16
                assert len(ready.pages) == pages_of_tokens + tables.state_pages


@KINDS
def test_a_full_cache_hit_reads_windows_and_states_from_the_prefill_node(model, architecture):
    known = model(architecture)
    length = {"gemma3_text": 300, "qwen3_next": 144}.get(architecture, LONG)
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        known.check(rig.serve(prompt(length), 20))
        rig.wires.seen.clear()
        again = rig.serve(prompt(length), 20)
        known.check(again)
        assert again.cached_tokens == length // 16 * 16
        assert handed(rig) == known.tables(16).pages_for(length) - length // 16
        rig.flush(*rig.decode)
        known.check(rig.serve(prompt(length), 20))
        assert rig.prefill[0].count("cached_tokens") >= 2 * ((length - 1) // 16 * 16)


def test_the_next_turn_of_a_conversation_continues_from_the_state_of_the_last_prompt(model):
    known = model("qwen3_next")
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        first = rig.serve(prompt(100), 20)
        second = rig.serve([*prompt(100), *first.tokens, *prompt(20, 3)], 20)
        known.check(second)
        assert rig.prefill[0].count("cached_tokens") == 96
        # The decode node also has the response's pages of the attention layer.
        assert second.cached_tokens == (100 + 20 - 1) // 16 * 16


def test_a_pool_fits_more_responses_with_windows_than_with_all_pages(model):
    """Some of the responses that do not fit are retracted, and continue later."""
    known = model("gemma3_text")
    tables = known.tables(16)
    for factor, retracts in ((1.0, True), (2.2, False)):
        num_pages = int(factor * tables.pages_to_compute(300))
        with PairRig(known.loaded, decode=[Size(num_pages=num_pages)], new_token_ratio=0.01) as rig:
            asked = [rig.ask(prompt(200, seed), 60) for seed in range(3)]
            rig.run()
            known.check(*asked)
            assert (rig.decode[0].count("retractions") > 0) is retracts
            assert 3 * tables.pages_to_compute(260) > num_pages


@pytest.mark.parametrize(
    "architecture",
    [*(pytest.param(each, marks=pytest.mark.long) for each in LATENT_ARCHITECTURES), "qwen3_next"],
)
@pytest.mark.parametrize("swap_pages, recomputed", [(64, False), (0, True)])
def test_a_retracted_request_returns(model, architecture, swap_pages, recomputed):
    known = model(architecture)
    size = Size(num_pages=3 * known.tables(16).pages_for(64) + 2, swap_pages=swap_pages)
    with PairRig(known.loaded, decode=[size], new_token_ratio=0.01) as rig:
        asked = [rig.ask(prompt(50, seed), 60) for seed in range(3)]
        rig.run()
        known.check(*asked)
        (decode,) = rig.decode
        assert decode.count("retractions") > 0
        assert (decode.count("recomputed") > 0) is recomputed


@KINDS
def test_a_request_continues_on_another_node_or_is_recomputed_without_a_source(model, architecture):
    known = model(architecture)
    with PairRig(known.loaded, prefill=(), decode=[ROOM]) as rig:
        asked = rig.ask(prompt(LONG), 40)
        replayed = rig.serve(prompt(LONG), 40, generated=known.greedy(prompt(LONG), 25))
        known.check(asked)
        assert replayed.tokens == known.greedy(prompt(LONG), 40)[25:]

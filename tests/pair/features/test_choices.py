"""Several requests with one prompt, as for n > 1. The prompt is computed and transferred once."""

import math

import pytest

from decode_node import handoffs
from tests.pair.rig import PairRig, Size, prompt

PAGE, NUM = 16, 4
ROOMY = (Size(num_pages=256),)
LENGTHS = [pytest.param(100, id="a part of a page"), pytest.param(96, id="whole pages")]


@pytest.fixture(autouse=True)
def _reads_are_soon(monkeypatch):
    """However slow this machine is."""
    monkeypatch.setattr(handoffs, "READ_SOON_S", math.inf)


# Seen failing if all of them are granted at once: each read all pages.
@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_and_transferred_once(known, length):
    text = prompt(length, 0)
    with PairRig(known.loaded, prefill=ROOMY, decode=ROOMY) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        asked = [rig.ask(text, 20) for _ in range(NUM)]
        rig.run()
        assert [each.tokens for each in asked] == [known.greedy(text, 20)] * NUM
        pages, rest = divmod(length, PAGE)
        assert decode.count("pages_read") == pages + NUM * (rest > 0)
        computed = prefill.count("prompt_tokens") - prefill.count("cached_tokens")
        assert computed == length + (NUM - 1) * (rest or PAGE)


@pytest.mark.parametrize("architecture", ["qwen3_next", "gemma3_text"])
def test_each_request_gets_states_and_windows(model, architecture):
    known, text = model(architecture), prompt(150, 0)
    with PairRig(known.loaded, prefill=ROOMY, decode=ROOMY) as rig:
        asked = [rig.ask(text, 20) for _ in range(NUM)]
        rig.run()
        assert [each.tokens for each in asked] == [known.greedy(text, 20)] * NUM
        alone = known.tables(PAGE).pages_for(150)
        assert rig.decode[0].count("pages_read") < NUM * alone


def test_each_request_has_its_own_seed_and_response(known):
    text, sampled = prompt(100, 0), {"temperature": 1.0}
    with PairRig(known.loaded, prefill=ROOMY, decode=ROOMY) as rig:
        alone = []
        for seed in range(NUM):
            alone.append(rig.ask(text, 12, seed=seed, **sampled))
            rig.run()
            rig.flush(*rig.nodes)
        together = [rig.ask(text, 12, seed=seed, **sampled) for seed in range(NUM)]
        rig.run()
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        assert len({tuple(each.tokens) for each in together}) > 1


# Seen failing if an abandoned attempt still counts as coming: the others waited without limit.
@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_if_the_first_attempt_fails_the_next_goes_first(known, how):
    text = prompt(100, 0)
    with PairRig(known.loaded, prefill=(*ROOMY, *ROOMY), decode=ROOMY) as rig:
        (decode,) = rig.decode
        rig.faults[0].freeze()
        first = rig.ask(text, 20, prefill=[0, 1])
        rest = [rig.ask(text, 20, prefill=[1]) for _ in range(NUM - 1)]
        rig.until(lambda: decode.queue("prealloc") == NUM - 1, "the others wait")
        if how == "cancelled":
            rig.cancel(first)
        else:
            rig.wires.cut(rig.prefill[0].front, decode.front)
        rig.run(*rest)
        rig.faults[0].release()
        rig.run()
        assert [each.tokens for each in rest] == [known.greedy(text, 20)] * (NUM - 1)
        rig.wires.heal()


def test_no_request_waits_for_reads_that_take_too_long(known, monkeypatch):
    monkeypatch.setattr(handoffs, "READ_SOON_S", 0.0)
    text = prompt(100, 0)
    with PairRig(known.loaded, prefill=(*ROOMY, *ROOMY), decode=ROOMY) as rig:
        rig.faults[0].freeze()
        slow, other = rig.ask(text, 20, prefill=[0]), rig.ask(text, 20, prefill=[1])
        rig.run(other)
        assert slow.ended is None
        rig.faults[0].release()
        rig.run()
        assert slow.tokens == other.tokens == known.greedy(text, 20)


def test_a_request_with_a_fully_cached_prompt_does_not_wait(known):
    text = prompt(100, 0)
    with PairRig(known.loaded, prefill=ROOMY, decode=ROOMY) as rig:
        (decode,) = rig.decode
        rig.serve(text, 2)
        rig.faults[0].freeze()
        asked = [rig.ask(text, 20) for _ in range(NUM)]
        rig.until(lambda: decode.queue("transfer") == NUM, "all are granted")
        rig.faults[0].release()
        rig.run()
        assert [each.tokens for each in asked] == [known.greedy(text, 20)] * NUM


def test_without_a_cache_no_request_waits(known):
    text = prompt(100, 0)
    nodes = (Size(num_pages=256, prefix_cache=False),)
    with PairRig(known.loaded, prefill=ROOMY, decode=nodes) as rig:
        asked = [rig.ask(text, 8) for _ in range(NUM)]
        rig.run()
        assert rig.decode[0].count("pages_read") == NUM * 7
        assert [each.tokens for each in asked] == [known.greedy(text, 8)] * NUM

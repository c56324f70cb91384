"""Layers that keep a state in place of pages, from one node to another: it goes with the last
pages, and a request that leaves the device takes it along."""

import pytest

from kvtransfer.messages import PagesReady
from tests.support.pair_node import Size
from tests.support.pair_rig import PairRig

LONG = 150
ROOM = Size(num_pages=128)


@pytest.fixture(scope="module")
def known(model):
    return model("qwen3_next")


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 250 for i in range(length)]


def ranges(rig: PairRig) -> list[PagesReady]:
    return [said for said in rig.wires.seen if isinstance(said, PagesReady)]


@pytest.mark.parametrize("length", [1, 48, LONG])
def test_answers_are_those_of_transformers_and_the_state_goes_with_the_last_pages(known, length):
    tables = known.tables(16)
    assert tables.state_pages
    chunks = {"chunked_prefill_tokens": 32}
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM], scheduler=chunks) as rig:
        asked = rig.ask(prompt(length), 40)
        rig.run()
        assert asked.tokens == known.greedy(prompt(length), 40)
        said = ranges(rig)
        assert sum(len(each.pages) for each in said) == tables.pages_for(length)
        pages_of_tokens = tables.num_pages(said[-1].end) - said[-1].start // 16
        assert len(said[-1].pages) == pages_of_tokens + tables.state_pages


def test_a_full_hit_here_still_needs_the_state_from_there(known):
    tables = known.tables(16)
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        first = rig.ask(prompt(144), 20)
        rig.run()
        rig.wires.seen.clear()
        again = rig.ask(prompt(144), 20)
        rig.run()
        assert again.tokens == first.tokens == known.greedy(prompt(144), 20)
        assert again.cached_tokens == 144
        assert [len(each.pages) for each in ranges(rig)][-1] == tables.state_pages
        assert sum(len(each.pages) for each in ranges(rig)) == tables.state_pages


def test_the_next_turn_of_a_conversation_goes_on_from_where_the_last_prompt_left_a_state(known):
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        first = rig.ask(prompt(100), 20)
        rig.run()
        longer = [*prompt(100), *first.tokens, *prompt(20, 3)]
        second = rig.ask(longer, 20)
        rig.run()
        assert second.tokens == known.greedy(longer, 20)
        (prefill,) = rig.prefill
        assert prefill.count("cached_tokens") == 96
        # Of the attention layer the decode node has the answer's pages too.
        assert second.cached_tokens == (100 + 20 - 1) // 16 * 16


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_answers_of_qwen3_5_are_those_of_transformers(model, architecture):
    known = model(architecture)
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        asked = [rig.ask(prompt(length, length), 20) for length in (3, 70)]
        rig.run()
        for length, one in zip((3, 70), asked, strict=True):
            assert one.tokens == known.greedy(prompt(length, length), 20)

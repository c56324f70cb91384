"""Layers that keep one latent of a token, from one node to another: pages like all others."""

import pytest

from kvtransfer.messages import Ready
from tests.support.checkpoints import LATENT_ARCHITECTURES
from tests.support.pair_node import Size
from tests.support.pair_rig import PairRig

ROOM = Size(num_pages=128)
LONG = 150


@pytest.fixture(scope="module", params=LATENT_ARCHITECTURES)
def known(request, model):
    return model(request.param)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 250 for i in range(length)]


def test_answers_are_those_of_transformers_and_the_second_time_from_what_is_cached(known):
    prompts = [prompt(length, length) for length in (1, 16, 17, LONG)]
    chunks = {"chunk_tokens": 32}
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM], scheduler=chunks) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        for cold in ((), (decode,)):
            rig.flush(*cold)
            rig.wires.seen.clear()
            asked = [rig.ask(each, 20) for each in prompts]
            rig.run()
            for each, one in zip(prompts, asked, strict=True):
                assert one.tokens == known.greedy(each, 20)
            handed = sum(len(said.pages) for said in rig.wires.seen if isinstance(said, Ready))
            assert handed == sum(-(-len(each) // 16) for each in prompts)
        assert prefill.count("cached_tokens") == 16 + LONG // 16 * 16
        again = rig.ask(prompts[-1], 20)
        rig.run()
        assert again.cached_tokens == LONG // 16 * 16
        assert again.tokens == known.greedy(prompts[-1], 20)


@pytest.mark.parametrize("host_pages, recomputed", [(64, False), (0, True)])
def test_a_request_that_leaves_the_device_comes_back(known, host_pages, recomputed):
    bold = {"new_token_ratio": 0.01, "min_new_token_ratio": 0.01}
    num_pages = 3 * known.tables(16).pages_for(64) + 2
    size = Size(num_pages=num_pages, num_slots=8, host_pages=host_pages)
    with PairRig(known.loaded, decode=[size], scheduler=bold) as rig:
        asked = [rig.ask(prompt(50, seed), 60) for seed in range(3)]
        rig.run()
        for seed, one in enumerate(asked):
            assert one.tokens == known.greedy(prompt(50, seed), 60)
        (decode,) = rig.decode
        assert decode.count("retractions") > 0
        assert (decode.count("recomputed") > 0) is recomputed


def test_a_request_goes_on_elsewhere_and_is_computed_here_when_no_owner_is_left(known):
    with PairRig(known.loaded, prefill=(), decode=[ROOM]) as rig:
        asked = rig.ask(prompt(LONG), 40)
        replayed = rig.ask(prompt(LONG), 40, generated=known.greedy(prompt(LONG), 25))
        rig.run()
        assert asked.tokens == known.greedy(prompt(LONG), 40)
        assert replayed.tokens == known.greedy(prompt(LONG), 40)[25:]

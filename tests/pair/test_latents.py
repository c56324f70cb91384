"""Layers that keep one latent of a token, from one node to another: pages like all others."""

import pytest

from kvtransfer.messages import PagesReady
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
    chunks = {"chunked_prefill_tokens": 32}
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM], scheduler=chunks) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        for cold in ((), (decode,)):
            rig.flush(*cold)
            rig.wires.seen.clear()
            asked = [rig.ask(each, 20) for each in prompts]
            rig.run()
            for each, one in zip(prompts, asked, strict=True):
                assert one.tokens == known.greedy(each, 20)
            handed = sum(len(said.pages) for said in rig.wires.seen if isinstance(said, PagesReady))
            assert handed == sum(-(-len(each) // 16) for each in prompts)
        assert prefill.count("cached_tokens") == 16 + LONG // 16 * 16
        again = rig.ask(prompts[-1], 20)
        rig.run()
        assert again.cached_tokens == LONG // 16 * 16
        assert again.tokens == known.greedy(prompts[-1], 20)

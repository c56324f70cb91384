"""Layers that keep latents or a state in place of keys and values: what they keep leaves the device
with its request, comes back with it, and is made anew where nobody has it."""

import pytest

from tests.support.checkpoints import LATENT_ARCHITECTURES
from tests.support.pair_node import Size
from tests.support.pair_rig import PairRig

ROOM = Size(num_pages=128)
LONG = 150


@pytest.fixture(scope="module", params=[*LATENT_ARCHITECTURES, "qwen3_next"])
def known(request, model):
    return model(request.param)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 250 for i in range(length)]


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

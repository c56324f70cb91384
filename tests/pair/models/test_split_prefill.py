"""Prompts that a decode node computes in groups of layers, one layer at a time, beside
responses. All responses are those of transformers."""

from functools import partial

import pytest

from common.config import LoraConfig
from engine.batch.request import FinishReason
from tests.pair.models.test_weight_updates import pause, put
from tests.pair.operations.test_pauses import paused, resumed
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.models.adapters import make_adapter, merge
from tests.support.models.checkpoints import (
    NATIVE_ARCHITECTURES,
    greedy_tokens,
    make_checkpoint,
    reference_model,
)

CHUNK_TOKENS = 64
QUICK = ("gemma2", "qwen3_next", "deepseek_v3")
RUNNING = list(range(3, 9))
PROMPTS = [[(17 * i + 5 * n) % 250 for i in range(n)] for n in (1, 40, 90, 150)]
MANY = 40  # tokens


class SplitRig(PairRig):
    """Decode nodes that compute all prompts, a layer of a chunk at a time while a response runs."""

    def __init__(self, loaded, **options):
        options = {"prefill": [], "split_prefill_ms": 1000.0, **options}
        super().__init__(loaded, chunked_prefill_tokens=CHUNK_TOKENS, **options)
        self.layers = []  # of each step
        for node in self.decode:
            node.clock.prefill.took(CHUNK_TOKENS, float(len(node.engine.model.layers)))
            node.clock.prefill.took = lambda work, seconds: None
            node.role.finish = partial(self._note, node.role.finish)

    def _note(self, finish, batch, result):
        self.layers.append(batch.layers)
        finish(batch, result)

    @property
    def splits(self):
        """The groups of layers that were computed."""
        return [layers for layers in self.layers if layers is not None]

    def begin(self, num_tokens=MANY, **options):
        """Return a request that runs."""
        asked = self.ask(RUNNING, num_tokens, **options)
        self.until(lambda: asked.tokens, "it runs")
        return asked

    def splits_after(self, count):
        self.until(lambda: len(self.splits) > count, "a group is computed")

    def between_groups(self):
        self.until(
            lambda: self.splits and not self.splits[-1].is_last, "a prompt is between its groups"
        )


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
        for name in NATIVE_ARCHITECTURES
    ],
)
def test_responses_are_those_of_transformers(model, architecture):
    known = model(architecture)
    with SplitRig(known.loaded, decode=[Size(num_pages=96)]) as rig:
        running = rig.begin()
        asked = [rig.ask(prompt, 8) for prompt in PROMPTS]
        rig.run()
        known.check(running, *asked)
        assert {layers.past - layers.first for layers in rig.splits} == {1}
        assert len(rig.splits) >= 2 * len(known.loaded.model.layers)


@pytest.mark.parametrize(
    "swap_pages",
    [pytest.param(0, id="recomputed", marks=pytest.mark.long), pytest.param(64, id="swapped")],
)
def test_retractions_change_no_response(known, swap_pages):
    size = Size(20, swap_pages=swap_pages)
    with SplitRig(known.loaded, decode=[size], new_token_ratio=0.1) as rig:
        running = [rig.begin() for _ in range(3)]
        asked = [rig.ask(prompt, MANY) for prompt in PROMPTS[:3]]
        rig.run()
        known.check(*running, *asked)
        assert rig.splits
        assert rig.decode[0].count("retractions")


def test_adapters_logprobs_and_prompt_logprobs(known, tmp_path):
    make_adapter(tmp_path / "a", known.reference, seed=1, rank=4)
    adapted = merge(reference_model(known.loaded.directory), tmp_path / "a")
    lora = LoraConfig(adapter_dir=tmp_path, preload=("a",), max_loras=2, max_rank=16)
    wanted = {"logprobs": 1, "prompt_logprobs": 1}

    def answers(limit_ms):
        with SplitRig(known.loaded, decode=[Size(lora=lora)], split_prefill_ms=limit_ms) as rig:
            running = rig.begin()
            name = dict(rig.decode[0].engine.loader.names())["a"]
            asked = [
                rig.ask(PROMPTS[2], 8, adapter=name),
                rig.ask(PROMPTS[2], 8, **wanted),
                rig.ask(PROMPTS[1], 8, presence_penalty=0.5),
            ]
            rig.run()
            known.check(running)
            return asked, bool(rig.splits)

    (split, is_split), (whole, is_whole) = answers(1000.0), answers(0.0)
    assert is_split and not is_whole
    assert [one.tokens for one in split] == [one.tokens for one in whole]
    assert split[0].tokens == greedy_tokens(adapted, [PROMPTS[2]], 8)[0]
    for kind in ("logprobs", "prompt_logprobs"):
        ours = [each.logprob for each in getattr(split[1], kind)]
        assert ours == pytest.approx([each.logprob for each in getattr(whole[1], kind)], abs=1e-4)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_between_groups(known, mode):
    with SplitRig(known.loaded) as rig:
        running = rig.begin()
        asked = rig.ask(PROMPTS[3], 8)
        rig.between_groups()
        paused(rig, mode)
        if mode != "in_place":
            assert rig.decode[0].pages("request") == 0
        resumed(rig)
        rig.run()
        if mode == "abort":
            assert {one.reason for one in (running, asked)} == {FinishReason.ABORT}
        else:
            known.check(running, asked)


def test_no_prompt_mixes_the_weights_before_and_after_an_update(tmp_path):
    for seed, name in enumerate(("old", "new")):
        make_checkpoint(tmp_path / name, seed=seed)
    loaded = Loaded.from_directory(tmp_path / "old")

    def greedy(name, tokens, count):
        return greedy_tokens(reference_model(tmp_path / name), [tokens], count)[0]

    with SplitRig(loaded, decode=[Size(weights_dir=tmp_path)], own_models=True) as rig:
        running = rig.begin()
        asked = rig.ask(PROMPTS[3], 8)
        rig.between_groups()
        pause(rig)
        put(rig, rig.decode[0])
        resumed(rig)
        rig.run()
        assert asked.tokens in (
            greedy("new", PROMPTS[3], 8),
            [*greedy("old", PROMPTS[3], 1), *greedy("new", [*PROMPTS[3], *asked.tokens[:1]], 7)],
        )
        assert running.reason is FinishReason.LENGTH


def test_cancelled_prompts_release_their_pages(known):
    with SplitRig(known.loaded) as rig:
        running = rig.begin(80)
        for prompt in PROMPTS[1:]:
            asked = rig.ask([9, *prompt], 8)
            rig.splits_after(len(rig.splits))
            rig.cancel(asked)
            rig.run(asked)
            assert asked.reason is FinishReason.ABORT
        rig.run()
        known.check(running)

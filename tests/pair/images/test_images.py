"""Prompts with images through a prefill and a decode node. Tokens are those of transformers,
wherever a chunk ends and whichever node computes it, and KV is shared by content."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.messages import PrepareWeights, ReleaseMemory, ResumeMemory, TakeWeights

pytest.importorskip("PIL")

from common.errors import InvalidRequest
from common.requests.images import FIRST_IMAGE_TOKEN, check_images
from engine.batch.images import VisibleImage
from engine.batch.request import FinishReason
from engine.models import load
from engine.models.families import read_decoder
from engine.models.vision.seeing import VisionTower
from engine.speculative import DraftPolicy, Speculator
from tests.pair.images.vision import NUM_TOKENS, VisionModel, ask, rig_of, seen, serve
from tests.pair.models.test_weight_updates import pause, put
from tests.pair.operations.test_pauses import call_node, resumed
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.models.drafters import recall, speculator
from tests.support.models.vision import (
    greedy_vision_tokens,
    make_vision_checkpoint,
    picture,
    reference_vision_model,
    with_images,
)

ONE = ("What is on this? ", picture(5, 3, 1), " Say it in one word.")
TWO = ("First ", picture(2, 7, 2), ", then some text between them, ", picture(4, 4, 3), "?")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return VisionModel(tmp_path_factory.mktemp("vision"))


def test_content_and_place_of_an_image_change_the_response(model):
    other = ("What is on this? ", picture(5, 3, 9), " Say it in one word.")
    turned = ("What is on this? ", picture(3, 5, 1), " Say it in one word.")
    answers = [model.greedy(parts) for parts in (ONE, other, turned)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_only_prompts_with_the_same_image_share_kv(model):
    other = (ONE[0], picture(5, 3, 9), ONE[2])  # as many placeholders
    longer = (*ONE, " And another: ", picture(2, 2, 4), ".")
    with rig_of(model) as rig:
        first = serve(rig, ONE)
        rig.flush(rig.decode[0])
        again, different = ask(rig, ONE), ask(rig, other)
        rig.run()
        rig.flush(rig.decode[0])
        follow_up = serve(rig, longer)
        assert first.tokens == again.tokens == model.greedy(ONE)
        assert different.tokens == model.greedy(other)
        assert follow_up.tokens == model.greedy(longer)
        num_tokens = len(again.prompt)
        assert different.cached_tokens == 16 < len(ONE[0]) + 1 + 15  # the text before the image
        assert again.cached_tokens == (num_tokens - 1) // 16 * 16
        assert follow_up.cached_tokens == num_tokens // 16 * 16
        # Cached images were not encoded again.
        assert seen(rig.prefill[0])[0] == 3


def test_an_image_that_occurs_twice_in_a_prompt_is_encoded_once(model):
    parts = ("One: ", picture(4, 4, 5), ", two: ", picture(4, 4, 5), ".")
    with rig_of(model) as rig:
        asked = serve(rig, parts)
        assert asked.tokens == model.greedy(parts)
        assert seen(rig.prefill[0]) == (1, 1)


def test_a_replay_continues_after_the_tokens_sent(model):
    token_ids, images = with_images(*TWO)
    answer = model.greedy(TWO)
    with rig_of(model) as rig:
        asked = rig.serve(token_ids, NUM_TOKENS, generated=answer[:3], images=images)
        assert asked.tokens == answer[3:]


def test_a_request_migrates_with_its_images(model):
    with rig_of(model, decode=[Size(), Size(prefix_cache=False)], migrates=True) as rig:
        token_ids, images = with_images(*ONE)
        tokens = rig.moved_midway(rig.ask(token_ids, 40, images=images), 2)
        assert tokens == model.greedy(ONE, num_tokens=40)


def test_a_node_rejects_images_that_it_cannot_compute(model):
    token_ids, images = with_images(*ONE)
    (image,) = images
    smaller = msgspec.structs.replace(image, pixels=image.pixels[: image.num_tokens * 3])
    with rig_of(model) as rig:
        refused = {
            "outside the vocabulary": rig.ask(token_ids, 1),
            "must have": rig.ask(token_ids, 1, images=[smaller]),
            "prompt_logprobs": rig.ask(token_ids, 1, images=images, prompt_logprobs=0),
        }
        rig.run()
        for reason, asked in refused.items():
            assert asked.reason is FinishReason.ERROR
            assert reason in asked.ended.error


def test_a_prompt_with_wrong_placeholder_tokens_is_rejected_at_submission():
    token_ids, images = with_images(*ONE)
    check_images(images, token_ids)
    other = with_images(ONE[0], picture(5, 3, 9), ONE[2])[0]
    (image,) = images
    shifted = msgspec.structs.replace(image, at=image.at + 1)
    for wrong, tokens in (
        (images, other),
        ([shifted], token_ids),
        ([image, image], token_ids),
        ([msgspec.structs.replace(image, rows=image.columns, columns=image.rows)], token_ids),
        ([msgspec.structs.replace(image, pixels=image.pixels[:-1])], token_ids),
    ):
        with pytest.raises(InvalidRequest, match="images"):
            check_images(wrong, tokens)


class SaysImages:
    """A drafter whose drafts are tokens of images in the prompt."""

    def propose(self, tokens, count):
        return np.resize(tokens[tokens >= FIRST_IMAGE_TOKEN], count)


def test_tokens_of_images_are_neither_drafted_nor_penalized(model):
    size = Size(speculator=Speculator(SaysImages(), DraftPolicy(5), 5))
    with rig_of(model, decode=[size]) as rig:
        guessed = ask(rig, ONE)
        penalised = serve(rig, TWO, repetition_penalty=1.3, frequency_penalty=0.5)
        assert guessed.tokens == model.greedy(ONE)
        assert len(penalised.tokens) == NUM_TOKENS


def test_rejected_drafts_behind_images_change_nothing(model):
    """The rows move back to an earlier start than at launch, at positions that differ from
    indices."""
    asked_of = {parts: with_images(*parts)[0] for parts in (ONE, TWO)}
    answers = [[*asked_of[parts], *model.greedy(parts, num_tokens=24)] for parts in asked_of]
    guesses = speculator("random", recall(answers), 256)
    with rig_of(model, decode=[Size(speculator=guesses)]) as rig:
        asked = [
            rig.ask(tokens, 24, images=with_images(*parts)[1]) for parts, tokens in asked_of.items()
        ]
        rig.run()
        assert [one.tokens for one in asked] == [answer[-24:] for answer in answers]
        assert rig.decode[0].count("draft_tokens/rejected") > 0


def test_a_configuration_of_transformers_4_is_read_alike(model, tmp_path):
    directory = model.loaded.directory
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype", "float32")}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert read_decoder(tmp_path).layers == read_decoder(directory).layers
    for name in ("model.safetensors", "preprocessor_config.json"):
        (tmp_path / name).symlink_to(directory / name)
    image = picture(3, 2, 1)
    new, old = (
        load(each, torch.device("cpu"), torch.float32).seeing for each in (directory, tmp_path)
    )
    embedded = [torch.zeros(6, 64) for _ in range(2)]
    for seeing, x in zip((new, old), embedded, strict=True):
        seeing.embed([VisibleImage(image, 0, 6, 0)], x)
    assert torch.equal(*embedded)


def test_the_cache_of_embeddings_has_a_limit_in_bytes():
    class Encoder:
        def encode(self, images):
            return [torch.full((image.num_tokens, 4), float(image.pixels[0])) for image in images]

    seeing = VisionTower(Encoder(), most_bytes=2 * 4 * 4 * 4)
    images = [picture(2, 2, seed) for seed in range(3)]
    for image in (*images, images[2], images[0]):
        x = torch.zeros(3, 4)
        seeing.embed([VisibleImage(image, 1, 4, 0)], x)
        assert (x == image.pixels[0]).all()
    assert (seeing.counts.encoded, seeing.counts.found) == (4, 1)
    assert seeing.num_bytes == 2 * 4 * 4 * 4


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return a directory of two models with one configuration. Their image encoders differ, too."""
    root = tmp_path_factory.mktemp("shelf")
    for seed, name in enumerate(("old", "new")):
        make_vision_checkpoint(root / name, seed=seed)
    return root


@pytest.mark.parametrize("from_node", [False, True], ids=["from_disk", "from_a_node"])
def test_an_update_of_weights_includes_the_encoder(shelf, from_node):
    references = {name: reference_vision_model(shelf / name) for name in ("old", "new")}
    token_ids, images = with_images(*ONE)
    known = {
        name: greedy_vision_tokens(reference, token_ids, images, NUM_TOKENS)
        for name, reference in references.items()
    }
    assert known["old"] != known["new"]
    loaded = Loaded.from_directory(shelf / "old")
    size = Size(weights_dir=shelf)
    with PairRig(loaded, prefill=[size], decode=[size], own_models=True, migrates=True) as rig:
        (producer,), (consumer,) = rig.prefill, rig.decode
        asked = serve(rig, ONE)
        assert asked.tokens == known["old"] and seen(producer) == (1, 0)
        pause(rig)
        put(rig, producer)
        if from_node:
            take = TakeWeights(producer.control.weights, producer.front.address)
            assert not call_node(rig, consumer, take).error
        else:
            put(rig, consumer)
        assert not any(node.engine.model.seeing.num_bytes for node in rig.nodes)
        resumed(rig)
        rig.until_paired()
        asked = serve(rig, ONE)
        assert (asked.tokens, asked.cached_tokens) == (known["new"], 0)


def test_an_update_with_another_encoder_architecture_is_rejected(shelf):
    broken = shelf / "broken"
    shutil.copytree(shelf / "new", broken, dirs_exist_ok=True)
    tensors = load_file(broken / "model.safetensors")
    name = next(each for each in tensors if each.startswith("visual."))
    save_file(
        {each: tensors[each] for each in tensors if each != name}, broken / "model.safetensors"
    )
    loaded = Loaded.from_directory(shelf / "old")
    sizes = {"prefill": (), "decode": [Size(weights_dir=shelf)]}
    with PairRig(loaded, **sizes, own_models=True) as rig:
        assert name in call_node(rig, rig.decode[0], PrepareWeights("broken")).error


def test_memory_of_the_encoder_is_released_and_restored(shelf):
    loaded = Loaded.from_directory(shelf / "old")
    size = Size(weights_dir=shelf)
    with PairRig(loaded, prefill=[size], decode=[size], own_models=True) as rig:
        before = serve(rig, ONE)
        pause(rig)
        (producer,) = rig.prefill
        assert not call_node(rig, producer, ReleaseMemory(("weights",))).error
        assert producer.engine.model.seeing.num_bytes == 0
        assert not call_node(rig, producer, ResumeMemory(("weights",))).error
        resumed(rig)
        rig.flush(*rig.nodes)
        after = serve(rig, ONE)
        assert before.tokens == after.tokens

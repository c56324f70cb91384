"""Prompts with images to each vision model. Logits and tokens are those of transformers' class,
wherever chunks end, whichever node computes them, and behind cached pages."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("PIL")

from common.config import SpeculativeConfig
from engine.batch.images import VisibleImage
from engine.kv_cache.layout import KVLayout
from engine.models import load
from engine.models.families import read_decoder
from engine.speculative import DraftPolicy, HeadDrafter, Speculator
from tests.pair.images.vision import NUM_TOKENS, ROOM, VisionModel, ask, encoded, rig_of, serve
from tests.pair.models.test_split_prefill import SplitRig
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.engine.steps import logits_after
from tests.support.hardware import devices
from tests.support.hardware.devices import CPU
from tests.support.models.drafters import TENSORS, make_followed_vision
from tests.support.models.quantized_checkpoints import FORMATS, requantised
from tests.support.models.vision import (
    PATCH,
    SQUARE,
    greedy_vision_tokens,
    make_vision_checkpoint,
    picture,
    reference_vision_model,
    vision_inputs,
    with_images,
    write_vision_files,
)

TEXT = ("No image at all, as most prompts are.",)
LONG = pytest.mark.long
MTP = SpeculativeConfig(method="mtp")


class ImageModel(VisionModel):
    def __init__(self, directory, model_type):
        super().__init__(directory, model_type)
        self.one = ("What is on this? ", self.shown(5, 3, 1), " Say it in one word.")
        between = ", then some text between them, "
        self.two = ("First ", self.shown(2, 7, 2), between, self.shown(4, 4, 3), "?")

    def shown(self, rows, columns, seed):
        if self.type == "llava":  # all of its images have one size
            return picture(SQUARE, SQUARE, seed, PATCH)
        if self.type == "gemma3":
            return picture(SQUARE, SQUARE, seed)
        return picture(rows, columns, seed)

    def inputs(self, parts):
        return vision_inputs(*with_images(*parts), self.type)


QUICK = ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "llava", "gemma3")
MODELS = (*QUICK, "qwen3_5_moe", "qwen3_vl_moe")
QUICK_WITH_ONE = pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=() if each == QUICK[0] else LONG) for each in MODELS],
    indirect=True,
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in QUICK else LONG) for each in MODELS],
)
def model(request, tmp_path_factory):
    return ImageModel(tmp_path_factory.mktemp("vision"), request.param)


@pytest.mark.parametrize("operations", [pytest.param("torch", marks=LONG), "compiled"])
def test_logits_are_those_of_transformers(model, operations, monkeypatch):
    devices.use(operations, monkeypatch)
    token_ids, images = with_images(*model.two)
    with torch.no_grad():
        expected = model.reference(**model.inputs(model.two)).logits[0]
    first, last = images
    # Chunks of all kinds: within an image, with both of them, and of one token.
    inside = [first.at + 5, last.at + 6, last.end - 1]
    if model.loaded.model.spec.whole_images:  # no chunk ends within an image
        inside = [first.at, first.end + 2, last.at - 1]
    ends = [3, *inside, *range(last.end, len(token_ids) + 1)]
    actual = logits_after(load(model.directory, CPU, torch.float32), token_ids, ends, images=images)
    assert (actual - expected[[end - 1 for end in ends]]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "chunked_prefill_tokens",
    [pytest.param(512, id="whole", marks=LONG), pytest.param(16, id="cut_through_images")],
)
def test_tokens_after_a_hand_off_are_those_of_transformers(model, chunked_prefill_tokens):
    with rig_of(model, chunked_prefill_tokens=chunked_prefill_tokens) as rig:
        asked = {parts: ask(rig, parts) for parts in (model.one, model.two, TEXT)}
        rig.run()
        assert [one.tokens for one in asked.values()] == [model.greedy(parts) for parts in asked]
        assert (encoded(rig.prefill[0]), encoded(rig.decode[0])) == (3, 0)


@QUICK_WITH_ONE
def test_images_in_groups_of_layers(model):
    with SplitRig(model.loaded, prefill=[], decode=[ROOM], own_models=True) as rig:
        running = rig.begin(200)
        asked = {parts: ask(rig, parts) for parts in (model.one, model.two)}
        rig.run(*asked.values())
        rig.cancel(running)
        assert rig.splits
        assert [one.tokens for one in asked.values()] == [model.greedy(parts) for parts in asked]


def test_a_second_question_about_an_image_reuses_its_kv(model):
    text, image, _ = model.one
    again = (*model.one, " And what is beside it?")
    with rig_of(model) as rig:
        serve(rig, model.one)
        rig.flush(rig.decode[0])
        second = serve(rig, again)
        assert second.tokens == model.greedy(again)
        assert second.cached_tokens >= len(text) + image.num_tokens
        assert encoded(rig.prefill[0]) == 1


@QUICK_WITH_ONE
def test_retracted_requests_are_recomputed_with_their_images(model):
    prompts = [("Look: ", model.shown(6, 6, 20 + i), "...") for i in range(4)]
    tables = KVLayout.of(model.loaded.model.spec.layers, 16, torch.float32).tables
    num_pages = 4 * tables.pages_to_compute(47) + 1
    size = Size(num_pages=num_pages, swap_pages=0, max_running_requests=4, prefix_cache=False)
    with rig_of(model, prefill=[], decode=[size], mode="colocated", new_token_ratio=0.01) as rig:
        # All start together, because their images are cached.
        rig.decode[0].engine.model.seeing.encode([image for _, image, _ in prompts], None)
        asked = [ask(rig, parts, 24) for parts in prompts]
        rig.run()
        answers = [one.tokens[:NUM_TOKENS] for one in asked]
        assert answers == [model.greedy(parts) for parts in prompts]
        assert rig.decode[0].count("recomputed") > 0


@LONG
def test_tensor_names_of_older_llavas(tmp_path):
    """Checkpoints of LLaVA 1.5 have another prefix in the encoder's names, and a buffer."""
    new, old = tmp_path / "new", tmp_path / "old"
    shutil.copytree(make_vision_checkpoint(new, model_type="llava"), old)
    tensors = load_file(old / TENSORS)
    tower, older = "vision_tower.", "vision_tower.vision_model."
    renamed = {name.replace(tower, older): tensor for name, tensor in tensors.items()}
    renamed[f"{older}embeddings.position_ids"] = torch.arange(SQUARE**2 + 1)
    save_file(renamed, old / TENSORS)
    image = picture(SQUARE, SQUARE, 1, PATCH)
    embedded = [torch.zeros(image.num_tokens, 64) for _ in range(2)]
    for directory, x in zip((new, old), embedded, strict=True):
        seeing = load(directory, CPU, torch.float32).seeing
        seeing.embed([VisibleImage(image, 0, image.num_tokens, 0)], x)
    assert embedded[0].any() and torch.equal(*embedded)


def test_stacked_experts_may_have_their_inputs_first(tmp_path):
    """Published checkpoints of Qwen3-VL have this layout."""
    directory = make_vision_checkpoint(tmp_path / "model", model_type="qwen3_vl_moe")
    token_ids, images = with_images("What is it? ", picture(5, 3, 1))
    expected = logits_after(load(directory, CPU, torch.float32), token_ids, images=images)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, directory / "model.safetensors")
    found = logits_after(load(directory, CPU, torch.float32), token_ids, images=images)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("qwen3_vl_moe", marks=LONG)])
def test_decoders_with_quantized_weights_support_images(tmp_path, model_type):
    """Quantizers leave the encoder unchanged."""
    source = make_vision_checkpoint(tmp_path / "source", model_type=model_type)
    form = FORMATS["awq"]
    quantised, twin = requantised(source, tmp_path, form, spared="visual.")
    token_ids, images = with_images("What is it? ", picture(5, 3, 1))
    found, expected, floats = (
        logits_after(load(each, CPU, torch.float32), token_ids, images=images)
        for each in (quantised, twin, source)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, floats, atol=1e-3)


def test_a_node_rejects_an_image_that_its_encoder_does_not_support(tmp_path):
    model = ImageModel(tmp_path, "llava")
    with rig_of(model, prefill=[]) as rig:
        asked = serve(rig, ("Look: ", picture(2, 3, 1, PATCH), "."))
        assert "2 x 3 tokens, the model accepts 6 x 6" in asked.ended.error


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "llava"])
def test_a_top_level_dtype_applies_to_the_decoder(tmp_path, model_type):
    write_vision_files(tmp_path, model_type=model_type)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "bfloat16"}
    config["text_config"].pop("dtype", None)
    path.write_text(json.dumps(config))
    assert read_decoder(tmp_path).model.dtype is torch.bfloat16


@LONG
def test_a_correct_draft_layer_has_all_drafts_accepted_behind_images(tmp_path):
    """Its vectors are found by token indices, which differ from positions. Seen failing with
    positions."""
    directory = make_followed_vision(tmp_path)
    loaded = Loaded.from_directory(directory, speculation=MTP)
    drafting = replace(ROOM, speculator=Speculator(HeadDrafter(), DraftPolicy(3), 3))
    with PairRig(loaded, prefill=[ROOM], decode=[drafting], chunked_prefill_tokens=16) as rig:
        two = ("First ", picture(2, 7, 2), ", then some text, ", picture(4, 4, 3), "?")
        token_ids, images = with_images(*two)
        asked = rig.serve(token_ids, 40, images=images)
        expected = greedy_vision_tokens(reference_vision_model(directory), token_ids, images, 40)
        assert asked.tokens == expected
        accepted, rejected = rig.decode[0].drafts()
        assert accepted > 0 and rejected == 0

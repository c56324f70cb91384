"""Prompts with videos through a pair of nodes. Tokens are those of transformers' class, wherever
chunks end and whichever node computes them, and KV is shared by content and time."""

import msgspec
import pytest
import torch

pytest.importorskip("PIL")

from common.errors import InvalidRequest
from common.requests.images import check_images
from engine.batch.images import AXES, positions_of, shift_of
from engine.models import load
from tests.pair.images.vision import NUM_TOKENS, ROOM, VisionModel, ask, encoded, rig_of, serve
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.engine.steps import logits_after
from tests.support.hardware.devices import CPU
from tests.support.models.vision import (
    SQUARE,
    clip,
    make_vision_checkpoint,
    patches,
    picture,
    reference_vision_model,
    vision_inputs,
    with_images,
)

LONG = pytest.mark.long


class VideoModel(VisionModel):
    def __init__(self, directory, model_type):
        super().__init__(directory, model_type)
        image = picture(2, 3, 5)
        self.one = ("What happens? ", *self.shown(3, 4, 3, 1), " Say it in one word.")
        self.two = ("First ", *self.shown(2, 2, 5, 2), ", ", image, *self.shown(2, 3, 2, 3), "?")

    def shown(self, num_patches, rows, columns, seed):
        """The parts of a prompt for a video."""
        if self.type == "qwen2_5_vl":
            return (clip(num_patches, rows, columns, seed, 1),)
        shown = patches(num_patches, rows, columns, seed)
        return [part for n, patch in enumerate(shown) for part in (f"<{n}.2 seconds>", patch)]


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=LONG)]
)
def model(request, tmp_path_factory):
    return VideoModel(tmp_path_factory.mktemp("video"), request.param)


def test_tokens_after_a_hand_off_are_those_of_transformers(model):
    """Chunks of 16 tokens end within patches of both videos."""
    with rig_of(model, chunked_prefill_tokens=16) as rig:
        asked = {parts: ask(rig, parts) for parts in (model.one, model.two)}
        rig.run()
        assert [one.tokens for one in asked.values()] == [model.greedy(parts) for parts in asked]
        assert (encoded(rig.prefill[0]), encoded(rig.decode[0])) == (8, 0)


def test_logits_are_those_of_transformers_where_a_video_is_long(tmp_path):
    """Its time axis is longer than its rows and columns. Text then follows the time axis, as in
    the model's own code and in vLLM. transformers 5 does that only for generated tokens, so the
    test passes the positions."""
    directory = make_vision_checkpoint(tmp_path)
    long = ("First ", clip(4, 2, 3, 7, 9), ", then ", clip(2, 3, 2, 8, 5), picture(2, 2, 1), ".")
    token_ids, images = with_images(*long)
    positions = torch.from_numpy(positions_of(images, 0, len(token_ids)))
    first, last = images[0], images[3]
    assert positions[0, last.at] == first.at + 27 == positions[1, last.at] + 27
    assert positions[0, last.end] == first.at + 28
    inputs = vision_inputs(token_ids, images, "qwen2_5_vl")
    with torch.no_grad():
        reference = reference_vision_model(directory)
        expected = reference(**inputs, position_ids=positions[:, None].long()).logits[0]
    ends = [3, first.at + 5, last.at + 1, *range(images[-1].end, len(token_ids) + 1)]
    actual = logits_after(load(directory, CPU, torch.float32), token_ids, ends, images=images)
    assert (actual - expected[[end - 1 for end in ends]]).abs().max() <= 1e-4


def test_positions_are_those_of_transformers(model):
    token_ids, images = with_images(*model.two)
    inputs = vision_inputs(token_ids, images, model.type)
    names = "input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw"
    given = {name: inputs[name] for name in (*names, "second_per_grid_ts") if name in inputs}
    expected, shift = model.reference.model.get_rope_index(**given)
    assert (positions_of(images, 0, len(token_ids)) == expected[:, 0].numpy()).all()
    assert expected.shape[0] == AXES and shift_of(images) == shift.item()


def test_kv_is_shared_by_prompts_with_the_same_video(model):
    again = (*model.one, " And then?")
    with rig_of(model) as rig:
        serve(rig, model.one)
        rig.flush(rig.decode[0])
        second = serve(rig, again)
        assert second.tokens == model.greedy(again)
        assert second.cached_tokens >= len(with_images(*model.one)[0]) // 16 * 16
        assert encoded(rig.prefill[0]) == 3


def test_videos_of_other_times_do_not_share_kv():
    slow, fast = (with_images("See ", clip(3, 4, 4, 1, step), "!") for step in (2, 3))
    first = slow[1][0]
    assert slow[0][: first.end] == fast[0][: first.end]
    assert not set(slow[0][first.end : -2]) & set(fast[0][first.end : -2])
    assert [patch.name for patch in slow[1]] == [patch.name for patch in fast[1]]


@LONG
def test_a_request_migrates_with_its_video(model):
    with rig_of(
        model, decode=[ROOM, Size(num_pages=400, prefix_cache=False)], migrates=True
    ) as rig:
        token_ids, images = with_images(*model.one)
        tokens = rig.moved_midway(rig.ask(token_ids, 40, images=images), 2)
        assert tokens == model.greedy(model.one, 40)


@LONG
def test_a_replay_continues_behind_a_video(model):
    token_ids, images = with_images(*model.one)
    answer = model.greedy(model.one)
    with rig_of(model) as rig:
        asked = rig.serve(token_ids, NUM_TOKENS, generated=answer[:3], images=images)
        assert asked.tokens == answer[3:]


def test_a_model_without_videos_rejects_them(tmp_path):
    loaded = Loaded.from_directory(make_vision_checkpoint(tmp_path, model_type="llava"))
    patch = msgspec.structs.replace(picture(SQUARE, SQUARE, 1, 4), frames=1)
    doubled = msgspec.structs.replace(patch, pixels=2 * patch.pixels, frames=2)
    with PairRig(loaded, prefill=[], decode=[ROOM], own_models=True) as rig:
        token_ids, images = with_images("See ", doubled)
        asked = rig.serve(token_ids, NUM_TOKENS, images=images)
        assert "the model accepts no videos" in asked.ended.error


def test_patches_that_continue_no_video_are_rejected():
    token_ids, images = with_images("See ", clip(3, 2, 2, 1, 2), "!")
    check_images(images, token_ids)
    first, second, third = images
    changed = msgspec.structs.replace
    for wrong in (
        (changed(first, time=1), second, third),
        (first, third),
        (first, changed(second, time=1 << 20), third),
        (first, changed(second, time=5), third),
        (first, changed(second, frames=1), third),
    ):
        ids = list(token_ids)
        for image in wrong:
            ids[image.at : image.end] = image.token_ids
        with pytest.raises(InvalidRequest, match=r"video|size"):
            check_images(wrong, ids)

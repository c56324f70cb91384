"""Videos as clients send them. The prompt has the markers and timestamps of transformers'
processor, nodes receive frames of the size that its video processor makes, and excessive videos
are rejected."""

import ast
import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("PIL")

import numpy as np
import transformers
from PIL import Image as Pillow

from api.images.decoder import fit_of
from common.config import ImagesConfig
from common.requests.images import check_images, from_proto
from protos import router_pb2
from tests.api.images.test_images import drawn, encoded, over_grpc, part, refused, submitted, text
from tests.api.rig import api_for
from tests.support.models.vision import (
    BEGIN,
    BEGIN_ID,
    END,
    END_ID,
    SIDE,
    VIDEO_PAD,
    files_of,
    write_vision_files,
)

FRAMES = [encoded(drawn(50, 33, seed=seed)) for seed in range(5)]


def video(frames=FRAMES, fps=4.0, **fields):
    urls = [part(frame)["image_url"]["url"] for frame in frames]
    return {"type": "video", "video": urls, "fps": fps} | fields


LONG = pytest.mark.long


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen2_5_vl", marks=LONG)])
def model(request, tmp_path_factory):
    return write_vision_files(tmp_path_factory.mktemp("video"), model_type=request.param)


def timed(model):
    return files_of(model).video.positions_per_second is None


def placeholders(fps, indices):
    """Return the text that transformers' processor writes for a video of patches of one token."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=BEGIN,
        video_token=VIDEO_PAD,
        vision_end_token=END,
        _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(None, *given),
    )
    metadata = SimpleNamespace(fps=fps, frames_indices=list(indices))
    grid = np.array([(len(indices) + 1) // 2, 2, 2])
    inputs = {"video_grid_thw": [grid], "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, inputs, 0)


def smart_resize(name):
    """transformers' function, from a module that cannot be imported without torchvision."""
    path = Path(transformers.__file__).parent / f"models/{name}/video_processing_{name}.py"
    module = ast.parse(path.read_text())
    defined = [each for each in module.body if getattr(each, "name", "") == "smart_resize"]
    found = {"math": math}
    exec(compile(ast.Module(defined, []), str(path), "exec"), found)
    return found["smart_resize"]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
async def test_nodes_receive_the_patches_of_a_video_at_their_places(tmp_path, model_type):
    model = write_vision_files(tmp_path, model_type=model_type)
    async with api_for(model) as api:
        submit = await submitted(api, text("See "), video(), text("!"))
        images = from_proto(submit.images)
        check_images(images, submit.token_ids)
        small = [image.frames for image in images]
        assert small == [2, 2, 2]
        last = images[-1].pixels
        assert last[: len(last) // 2] == last[len(last) // 2 :]  # the last frame is repeated
        # Between the patches: the prompt without their tokens.
        rest = list(submit.token_ids)
        for image in reversed(images):
            del rest[image.at : image.end]
        if timed(model):
            assert all(image.time is None for image in images)
            written = placeholders(4.0, range(5)).replace(VIDEO_PAD, "")
            for mark, token in ((BEGIN, BEGIN_ID), (END, END_ID)):
                assert rest.count(token) == 3
                written = written.replace(mark, "")
            said = bytes(token for token in rest if token < 256).decode()
            assert f"See \n{written}" in said or f"See {written}" in said
        else:
            # 4 positions a second, and half a second for a patch
            assert [image.time for image in images] == [None, 2, 4]
            assert rest.count(BEGIN_ID) == rest.count(END_ID) == 1
            assert images[0].end == images[1].at and images[1].end == images[2].at


@pytest.mark.parametrize("num_frames", [2, 3, 5, 8])
@pytest.mark.parametrize("size", [(33, 50), (90, 200), (8, 8), (3, 5), (300, 700), (20, 3000)])
def test_sizes_of_frames_are_those_of_transformers(model, size, num_frames):
    files = files_of(model)
    limits = files.video.size.min_pixels, files.video.size.max_pixels
    if timed(model):
        expected = smart_resize("qwen3_vl")(num_frames, *size, 2, SIDE, *limits)
    else:
        expected = smart_resize("qwen2_vl")(*size, SIDE, *limits)
    assert fit_of(*size, files, 10**6, num_frames).resized == expected


async def test_a_video_is_scaled_down_to_fit(model):
    async with api_for(model, images=ImagesConfig(max_tokens_per_image=4)) as api:
        submit = await submitted(api, video(), part(FRAMES[0]))
    assert all(image.rows * image.columns <= 4 for image in submit.images)
    assert [image.frames for image in submit.images] == [2, 2, 2, 1]


async def test_every_notation_of_a_video_gives_the_same_prompt(model):
    file = [io.BytesIO() for _ in range(4)]
    for each, frame in zip(file, FRAMES, strict=False):
        Pillow.open(io.BytesIO(frame)).convert("RGB").save(each, "JPEG")
    frames = [each.getvalue() for each in file]
    listed = video(frames, 2.0)
    codes = [url.partition(",")[2] for url in listed["video"]]
    url = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(codes)}}
    async with api_for(model) as api:
        submits = [await submitted(api, text("See "), each) for each in (listed, url)]
        parts = [
            router_pb2.ChatPart(text="See "),
            router_pb2.ChatPart(video=router_pb2.Video(frames=frames)),
        ]
        answer = await over_grpc(api, "Tokenize", *parts)
    assert submits[0].token_ids == submits[1].token_ids == answer.token_ids


async def test_an_excessive_or_invalid_video_is_rejected_by_name(model):
    container = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    frames = [*FRAMES[:2], encoded(drawn(400, 33))]
    async with api_for(model, images=ImagesConfig(max_frames=5)) as api:
        for parts, reason in (
            ([container], "video files are not decoded"),
            ([video(FRAMES + FRAMES[:1])], "6 frames of videos, 5 allowed"),
            ([video(FRAMES[:1])], "at least 2 frames"),
            ([video(fps=0.0)], "fps is 0, expected 0.01 to 1000"),
            ([video(frames)], "the frames of a video differ in size"),
            ([video(), text(VIDEO_PAD)], "2 placeholders for 1 videos|placeholders for"),
            ([video(video=["x"] * 200)], "128"),
            ([video(), video(), text("!")], "10 frames of videos"),
            ([video(audio="x")], "audio"),
        ):
            said = await refused(api, *parts)
            assert any(each in said for each in reason.split("|")), said


async def test_too_long_a_time_axis_is_rejected(tmp_path):
    directory = write_vision_files(tmp_path)
    async with api_for(directory) as api:
        assert "positions left" in await refused(api, video(fps=0.01))


@pytest.mark.parametrize("sees", [True, False])
async def test_a_model_without_videos_rejects_them(tmp_path, sees):
    directory = write_vision_files(tmp_path, model_type="llava", sees=sees)
    async with api_for(directory) as api:
        assert "this model does not support" in await refused(api, video())

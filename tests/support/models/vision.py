"""Tiny random vision models with a byte-level tokenizer, images, and the oracle."""

import base64
import io
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common.model_directory import VisionFiles, vision_files
from common.requests.images import Image
from tests.support.models.checkpoints import (
    EXPERT_SIZES,
    HYBRID_SIZES,
    SIZES,
    make_tokenizer,
    reference_model,
)

BEGIN, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
VIDEO_PAD = "<|video_pad|>"
BEGIN_ID, PAD_ID, END_ID, VIDEO_PAD_ID = 258, 259, 260, 261  # after the tokenizer's other tokens
POSITIONS_PER_SECOND = 4  # the default of Qwen2.5-VL's configuration
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image_url' in part %}" + BEGIN + PAD + END + "{% elif "
    "part['type'] == 'video' %}" + BEGIN + VIDEO_PAD + END + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_vision_checkpoint(
    directory: Path, *, model_type: str = "qwen2_5_vl", seed: int = 0, **sizes: int
) -> Path:
    """Write a checkpoint like `make_checkpoint`. Weights are large enough to make errors visible.

    Args:
        sizes: fields of the decoder's configuration.
    """
    torch.manual_seed(seed)
    config = _config(model_type, **sizes)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(2.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if any(part in name for part in ("q_proj", "k_proj", "qkv")):
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    write_vision_files(directory, model_type=model_type)
    config.save_pretrained(directory)
    return directory


def write_vision_files(
    directory: Path,
    *,
    model_type: str = "qwen2_5_vl",
    max_pixels: int = 64 * SIDE**2,
    sees: bool = True,
) -> Path:
    """Write all files that a router reads.

    Args:
        sees: False: a text model with the same tokenizer and chat template.
    """
    config = _config(model_type)
    (config if sees else config.text_config).save_pretrained(directory)
    processor = _processor(model_type, max_pixels)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    make_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([BEGIN, PAD, END, VIDEO_PAD])
    assert tokenizer.token_to_id(PAD) == PAD_ID
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    written = BEGIN if model_type == "gemma3" else BEGIN + PAD + END
    fast.chat_template = CHAT_TEMPLATE.replace(BEGIN + PAD + END, written)
    fast.save_pretrained(directory)
    return directory


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_THIRDS = _INTERLEAVED | {"mrope_section": [6, 5, 5]}
_HYBRID = {
    **SIZES,
    **HYBRID_SIZES,
    "rope_parameters": _INTERLEAVED | {"partial_rotary_factor": 0.5},
}
_LEARNT = {**_VISION, "num_position_embeddings": 16}
_MARKS = {
    "image_token_id": PAD_ID,
    "video_token_id": VIDEO_PAD_ID,
    "vision_start_token_id": BEGIN_ID,
    "vision_end_token_id": END_ID,
}
SQUARE = 6  # tokens per side of every image of LLaVA and Gemma 3
# Configuration fields by model_type: of the decoder, of the image encoder, and others.
_SIZES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_5_vl": (
        {**SIZES, "rope_parameters": _ROPE},
        {**_VISION, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        _MARKS,
    ),
    "qwen3_vl": (
        {**SIZES, "num_hidden_layers": 3, "head_dim": 32, "rope_parameters": _THIRDS},
        {**_LEARNT, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        _MARKS,
    ),
    "qwen3_vl_moe": (
        {**SIZES, "head_dim": 32, "rope_parameters": _THIRDS, **EXPERT_SIZES},
        {**_LEARNT, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        _MARKS,
    ),
    "qwen3_5": (_HYBRID, _LEARNT, _MARKS),
    "qwen3_5_moe": (_HYBRID | EXPERT_SIZES, _LEARNT, _MARKS),
    "llava": (
        {"model_type": "llama", **SIZES},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "image_size": SQUARE * PATCH,
        },
        {"image_token_index": PAD_ID},
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            **SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "image_size": SQUARE * SIDE,
        },
        {
            "image_token_index": PAD_ID,
            "boi_token_index": BEGIN_ID,
            "eoi_token_index": END_ID,
            "mm_tokens_per_image": SQUARE**2,
        },
    ),
}


def _config(model_type: str, **sizes: int) -> PreTrainedConfig:
    text, vision, others = (dict(each) for each in _SIZES[model_type])
    text |= sizes
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **others)


def _processor(model_type: str, max_pixels: int) -> dict[str, Any]:
    """Return the content of preprocessor_config.json."""
    scale = {"image_mean": MEAN, "image_std": STD}
    if model_type == "llava":
        side = SQUARE * PATCH
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side + 4},
            "crop_size": {"height": side, "width": side},
            "do_center_crop": True,
            "resample": 3,
            **scale,
        }
    if model_type == "gemma3":
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": SQUARE * SIDE, "width": SQUARE * SIDE},
            "resample": 2,
            **scale,
        }
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": SIDE**2,
        "max_pixels": max_pixels,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        **scale,
    }


def image_processor(
    max_pixels: int = 64 * SIDE**2, model_type: str = "qwen2_5_vl", **options: Any
) -> Any:
    """Return transformers' image processor."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kinds = {"llava": CLIPImageProcessorPil, "gemma3": Gemma3ImageProcessorPil}
    kind = kinds.get(model_type, Qwen2VLImageProcessorPil)
    fields = _processor(model_type, max_pixels)
    del fields["image_processor_type"]
    return kind(**(fields | options))


def files_of(directory: Path) -> VisionFiles:
    files = vision_files(directory)
    assert files is not None
    return files


def picture(rows: int, columns: int, seed: int, side: int = SIDE) -> Image:
    """Return an image of random noise."""
    drawn = np.random.default_rng(seed).integers(0, 256, (rows * side, columns * side, 3), np.uint8)
    return Image(0, rows, columns, drawn.tobytes())


def data_url(image: Pillow.Image) -> str:
    """Return an image as a PNG in a URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def noise_url(seed: int) -> str:
    noise = np.random.default_rng(seed).integers(0, 256, (45, 70, 3), np.uint8)
    return data_url(Pillow.fromarray(noise))


FRAMES = 2  # frames of a temporal patch
Clip = tuple[Image, ...]


def clip(num_patches: int, rows: int, columns: int, seed: int, interval: int) -> Clip:
    """Return the temporal patches of a video of noise, for a model with a time axis.

    Args:
        interval: positions from one patch to the next.
    """
    return tuple(
        Image(0, rows, columns, patch.pixels, FRAMES, number * interval if number else None)
        for number, patch in enumerate(patches(num_patches, rows, columns, seed))
    )


def patches(num_patches: int, rows: int, columns: int, seed: int) -> Clip:
    """Return the temporal patches of a video of noise, for a model with timestamps."""
    both = [
        [picture(rows, columns, 100 * seed + FRAMES * number + each) for each in range(FRAMES)]
        for number in range(num_patches)
    ]
    return tuple(
        Image(0, rows, columns, b"".join(frame.pixels for frame in frames), FRAMES)
        for frames in both
    )


def with_images(*parts: str | Image | Clip) -> tuple[list[int], tuple[Image, ...]]:
    """Return the token ids of a prompt with texts, images and videos, and its placed images."""
    token_ids: list[int] = []
    placed: list[Image] = []
    for part in parts:
        if isinstance(part, str):
            token_ids += part.encode()
            continue
        token_ids.append(BEGIN_ID)
        for image in (part,) if isinstance(part, Image) else part:
            placed.append(msgspec.structs.replace(image, at=len(token_ids)))
            token_ids += image.token_ids
        token_ids.append(END_ID)
    return token_ids, tuple(placed)


def reference_vision_model(directory: Path) -> PreTrainedModel:
    """Load transformers' model with images, see `reference_model`."""
    return reference_model(directory, AutoModelForImageTextToText)


def vision_inputs(
    token_ids: Sequence[int], images: Sequence[Image], model_type: str
) -> dict[str, Any]:
    """Return transformers' inputs for a prompt. Images are already in their final size."""
    ids = list(token_ids)
    for image in images:
        pad = PAD_ID if image.frames == 1 else VIDEO_PAD_ID
        ids[image.at : image.end] = [pad] * image.num_tokens
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    as_they_are = {"do_resize": False}
    if model_type == "llava":
        as_they_are["do_center_crop"] = False
    elif model_type == "gemma3":
        inputs["token_type_ids"] = (tokens == PAD_ID).int()
    else:
        inputs["mm_token_type_ids"] = (tokens == PAD_ID).int() + 2 * (tokens == VIDEO_PAD_ID).int()
    stills = [image for image in images if image.frames == 1]
    if stills:
        processor = image_processor(model_type=model_type, **as_they_are)
        arrays = [_array(image) for image in stills]
        inputs |= processor(arrays, return_tensors="pt", input_data_format="channels_last")
        inputs.pop("num_crops", None)
    return inputs | _video_inputs([image for image in images if image.frames > 1])


def _video_inputs(shown: Sequence[Image]) -> dict[str, Any]:
    """Return transformers' inputs for videos.

    transformers' video processor needs torchvision, so this repeats its two steps after resizing:
    the scale, and Qwen2VLVideoProcessor.patchify.
    """
    videos: list[list[Image]] = []
    for image in shown:
        if videos and videos[-1][-1].end == image.at:
            videos[-1].append(image)
        else:
            videos.append([image])
    if not videos:
        return {}
    values, grids, intervals = [], [], []
    for video in videos:
        arrays = [_array(image) for image in video]
        frames = torch.tensor(np.concatenate(arrays)).permute(0, 3, 1, 2) / 255
        scaled = (frames - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        rows, columns = video[0].rows, video[0].columns
        size = (len(video), FRAMES, 3, rows, MERGE, PATCH, columns, MERGE, PATCH)
        apart = scaled.reshape(1, *size).permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
        values.append(apart.reshape(len(video) * rows * columns * MERGE**2, -1))
        grids.append([len(video), rows * MERGE, columns * MERGE])
        intervals.append(video[1].time if len(video) > 1 else 1)
    made = {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
    if any(len(video) > 1 for video in videos):
        made["second_per_grid_ts"] = torch.tensor(intervals) / POSITIONS_PER_SECOND
    return made


def _array(image: Image) -> Any:
    side = math.isqrt(len(image.pixels) // (3 * image.num_tokens * image.frames))
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.frames, -1)
    arrays = pixels.reshape(image.frames, image.rows * side, image.columns * side, 3)
    return arrays if image.frames > 1 else arrays[0]


def greedy_vision_tokens(
    model: PreTrainedModel, token_ids: Sequence[int], images: Sequence[Image], num_tokens: int
) -> list[int]:
    """Return the tokens that transformers generates."""
    inputs = vision_inputs(token_ids, images, model.config.model_type)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return out[0, len(token_ids) :].tolist()


def headed(kind: str, width: int, height: int) -> bytes:
    """Return a one-pixel image file whose header claims this size. A WEBP really has that size."""
    if kind == "WEBP":
        start, rest = "524946461a000000574542505650384c0e0000002f", "071011fd0f4444ff03"
        size = struct.pack("<I", (height - 1) << 14 | (width - 1))
        return bytes.fromhex(start) + size + bytes.fromhex(rest)
    file = io.BytesIO()
    Pillow.new("P" if kind == "GIF" else "RGB", (1, 1)).save(file, kind)
    content = bytearray(file.getvalue())
    match kind:
        case "PNG":
            struct.pack_into(">II", content, 16, width, height)
            struct.pack_into(">I", content, 29, zlib.crc32(content[12:29]))
        case "JPEG":
            struct.pack_into(">HH", content, content.index(b"\xff\xc0") + 5, height, width)
        case "GIF":
            struct.pack_into("<HH", content, 6, width, height)
    return bytes(content)

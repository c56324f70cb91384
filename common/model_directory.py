"""Checkpoint files that routers and nodes read: the model's directory, and its image settings.

A model is a directory, or a hub id whose files are downloaded once.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "modules.json",  # of sentence-transformers, which has a directory for each module
    "*_Pooling/config.json",
)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


def model_directory(model: str, *, weights: bool) -> Path:
    """Return the directory with the files of `model`.

    Args:
        model: path or hub id.
        weights: False: weights are not downloaded.
    Raises:
        ConfigError: the directory does not exist, or the hub lacks the model or is unreachable.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model: no such directory: {model}")
    # Imported late: a local directory needs no HTTP client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: {model} is not a directory and cannot be downloaded: {reason}"
        ) from error


# Image settings. Routers resize images by them, and nodes encode images by them. Defaults are those
# of the configuration and image processor classes in transformers.

_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class AreaSize(msgspec.Struct, frozen=True, tag=True):
    """Resizing rule: keep the aspect ratio, with sides that are multiples of a token's side.

    Attributes:
        min_pixels, max_pixels: range of pixels after resizing.
    """

    min_pixels: int
    max_pixels: int


class ClipSize(msgspec.Struct, frozen=True, tag=True):
    """Resizing rule: like AreaSize, for all frames of a video together.

    Attributes:
        min_pixels, max_pixels: range of pixels in all resized frames.
    """

    min_pixels: int
    max_pixels: int


class SquareSize(msgspec.Struct, frozen=True, tag=True):
    """Resizing rule: resize, then crop the middle to a square of fixed size.

    Attributes:
        shorter_side: pixels of the shorter side after resizing.
        side: pixels per side of the square.
    """

    shorter_side: int
    side: int


class StretchedSize(msgspec.Struct, frozen=True, tag=True):
    """Resizing rule: stretch to a square of fixed size.

    Attributes:
        side: pixels per side of the square.
    """

    side: int


class VideoFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Video settings of a model.

    Attributes:
        begin, placeholder, end: tokens that the chat template writes for a video.
        positions_per_second: length of a second on the time axis of positions. None: temporal
            patches have positions like images, and the prompt has a timestamp before each.
    """

    begin: int
    placeholder: int
    end: int
    size: AreaSize | ClipSize
    positions_per_second: float | None


class VisionFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Image settings of a model.

    Attributes:
        placeholder: token that the chat template writes for an image.
        patch_side: pixels per side of a patch.
        merge: patches per side of a token.
        frames: frames in a temporal patch of a video. A single image is repeated.
        mean, std: of red, green and blue, where 1 is the brightest.
        axial: image tokens have positions by row and column, instead of like text.
        resample: Pillow's number of the resizing filter.
        whole: tokens of an image attend to all tokens of that image.
        surrounded: tokens before and after an image's tokens. The chat template writes only the
            first one. None: it writes the placeholder.
        video: None: the model has no video input.
    """

    placeholder: int
    patch_side: int
    merge: int
    frames: int
    size: AreaSize | SquareSize | StretchedSize
    mean: tuple[float, ...]
    std: tuple[float, ...]
    axial: bool
    resample: int = _BICUBIC
    whole: bool = False
    surrounded: tuple[int, int] | None = None
    video: VideoFiles | None = None

    @property
    def token_side(self) -> int:
        """Pixels per side of the area of one token."""
        return self.patch_side * self.merge

    @property
    def tokens_per_side(self) -> int:
        """Rows and columns of every image, or 0 if they depend on its size."""
        match self.size:
            case SquareSize(side=side) | StretchedSize(side=side):
                return side // self.token_side
            case AreaSize():
                return 0


def vision_files(directory: Path) -> VisionFiles | None:
    """Return the image settings of a model, or None if it has none or Baton does not support them.

    Raises:
        ConfigError: a file has invalid values.
    """
    config = _object(directory / "config.json")
    reader = _IMAGE_MODELS.get(str(config.get("model_type")))
    vision, processor = config.get("vision_config"), _processor(directory)
    if reader is None or not vision or not processor:
        return None
    try:
        files = reader(config, vision, processor, _video_processor(directory) or processor)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{directory}: its image configuration is not supported: {error}. To serve only texts, "
            "remove vision_config from config.json"
        ) from error
    sizes = (files.size,) if files.video is None else (files.size, files.video.size)
    numbers = [each for size in sizes for each in msgspec.structs.astuple(size)]
    numbers += files.patch_side, files.merge, files.frames
    if min(numbers) < 1 or len(files.mean) != 3 or len(files.std) != 3 or 0.0 in files.std:
        raise ConfigError(f"{directory}: its image configuration is not supported: {files}")
    return files


_Json = Mapping[str, Any]


def _by_area(
    config: _Json,
    vision: _Json,
    processor: _Json,
    video_processor: _Json,
    *,
    placeholder: int,
    patch_side: int,
    timestamps: bool,
) -> VisionFiles:
    """Read the settings of a model with Qwen2VLImageProcessor.

    Args:
        placeholder, patch_side: defaults. By default, the tokens around a placeholder and the video
            placeholder have adjacent ids.
        timestamps: the prompt has a timestamp before each temporal patch of a video.
    """
    patch_side = int(vision.get("patch_size", patch_side))
    merge = int(vision.get("spatial_merge_size", 2))
    frames = int(vision.get("temporal_patch_size", 2))
    sides = {"patch_size": patch_side, "merge_size": merge, "temporal_patch_size": frames}
    mean, std = _scale(processor)
    for settings in (processor, video_processor):
        _must_be(settings, sides)
    if _scale(video_processor) != (mean, std):
        raise ValueError("image_mean and image_std of videos differ from those of images")
    clip = ClipSize(*_edges(video_processor, 128 * 32**2, 768 * 32**2))
    frame = AreaSize(*_edges(video_processor, 128 * 28**2, 768 * 28**2))
    video = VideoFiles(
        begin=int(config.get("vision_start_token_id", placeholder - 3)),
        placeholder=int(config.get("video_token_id", placeholder + 1)),
        end=int(config.get("vision_end_token_id", placeholder - 2)),
        size=clip if timestamps else frame,
        positions_per_second=None if timestamps else float(vision.get("tokens_per_second", 4)),
    )
    return VisionFiles(
        placeholder=int(config.get("image_token_id", placeholder)),
        patch_side=patch_side,
        merge=merge,
        frames=frames,
        size=AreaSize(*_edges(processor, 56 * 56, 28 * 28 * 1280)),
        mean=mean,
        std=std,
        axial=True,
        video=video,
    )


def _edges(processor: _Json, least: int, most: int) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels after resizing.

    Args:
        least, most: defaults.
    """
    size = processor.get("size") or {}
    return (
        int(processor.get("min_pixels") or size.get("shortest_edge") or least),
        int(processor.get("max_pixels") or size.get("longest_edge") or most),
    )


def _by_square(config: _Json, vision: _Json, processor: _Json, _: _Json) -> VisionFiles:
    """Read the settings of LLaVA 1.5: a CLIP encoder, whose first token is dropped."""
    side, patch_side = int(vision.get("image_size", 336)), int(vision.get("patch_size", 14))
    crop, size = processor.get("crop_size", side), processor["size"]
    mean, std = _scale(processor)
    _must_be(vision, {"model_type": "clip_vision_model"})
    _must_be(config, {"vision_feature_select_strategy": "default"})
    _must_be(processor, {"do_center_crop": True, "do_pad": False, "resample": _BICUBIC})
    shorter_side = int(size["shortest_edge"] if isinstance(size, dict) else size)
    if crop not in (side, {"height": side, "width": side}) or shorter_side < side:
        raise ValueError(f"size is {size} and crop_size {crop}, the encoder needs {side}")
    if side % patch_side:
        raise ValueError(
            f"image_size is {side}, which is not a multiple of patch_size {patch_side}"
        )
    return VisionFiles(
        placeholder=int(config.get("image_token_index", config.get("image_token_id", 32000))),
        patch_side=patch_side,
        merge=1,
        frames=1,
        size=SquareSize(shorter_side, side),
        mean=mean,
        std=std,
        axial=False,
    )


def _by_stretch(config: _Json, vision: _Json, processor: _Json, _: _Json) -> VisionFiles:
    """Read the settings of Gemma 3: a SigLIP encoder, whose patches are pooled."""
    side, patch_side = int(vision.get("image_size", 224)), int(vision.get("patch_size", 16))
    per_side = math.isqrt(int(config.get("mm_tokens_per_image", 256)))
    merge = side // (patch_side * per_side)
    if merge * patch_side * per_side != side:
        raise ValueError(
            f"image_size is {side}, which is not a multiple of {patch_side * per_side}"
        )
    _must_be(vision, {"model_type": "siglip_vision_model"})
    square = {"height": side, "width": side}
    _must_be(processor, {"resample": _BILINEAR, "size": square})
    if processor.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan is true, which is not supported")
    mean, std = _scale({"image_mean": _HALF, "image_std": _HALF, **processor})
    return VisionFiles(
        placeholder=int(config.get("image_token_index", config.get("image_token_id", 262144))),
        patch_side=patch_side,
        merge=merge,
        frames=1,
        size=StretchedSize(side),
        mean=mean,
        std=std,
        axial=False,
        resample=_BILINEAR,
        whole=True,
        surrounded=(
            int(config.get("boi_token_index", config.get("boi_token_id", 255999))),
            int(config.get("eoi_token_index", config.get("eoi_token_id", 256000))),
        ),
    )


def _must_be(settings: _Json, supported: _Json) -> None:
    """Raise ValueError if a setting is present with another value."""
    for name, value in supported.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{name} is {settings[name]}, expected {value}")


def _scale(processor: _Json) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the colours."""
    return (
        tuple(map(float, processor.get("image_mean") or _CLIP_MEAN)),
        tuple(map(float, processor.get("image_std") or _CLIP_STD)),
    )


# Reader of the settings by model_type. It gets config.json, its vision_config, and the settings of
# the image and video processors. Other vision models are served for text only.
_IMAGE_MODELS: Mapping[str, Callable[[_Json, _Json, _Json, _Json], VisionFiles]] = {
    "qwen2_5_vl": partial(_by_area, placeholder=151655, patch_side=14, timestamps=False),
    "qwen3_vl": partial(_by_area, placeholder=151655, patch_side=16, timestamps=True),
    "qwen3_vl_moe": partial(_by_area, placeholder=151655, patch_side=16, timestamps=True),
    "qwen3_5": partial(_by_area, placeholder=248056, patch_side=16, timestamps=True),
    "qwen3_5_moe": partial(_by_area, placeholder=248056, patch_side=16, timestamps=True),
    "llava": _by_square,
    "gemma3": _by_stretch,
}


def _processor(directory: Path) -> Mapping[str, Any]:
    """Return image processor settings. transformers 5 keeps them with the text processor's."""
    own = directory / "preprocessor_config.json"
    return _object(own) if own.is_file() else _nested_processor(directory, "image_processor")


def _video_processor(directory: Path) -> Mapping[str, Any]:
    """Return the video processor's settings, {} if it has none of its own."""
    nested = _nested_processor(directory, "video_processor")
    own = directory / "video_preprocessor_config.json"
    return nested or (_object(own) if own.is_file() else {})


def _nested_processor(directory: Path, name: str) -> Mapping[str, Any]:
    all_of_them = directory / "processor_config.json"
    return (_object(all_of_them).get(name) or {}) if all_of_them.is_file() else {}


def _object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content

"""Files of a checkpoint that routers and nodes read: its directory, and its image settings.

A model is a directory, or a hub id whose files are downloaded once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
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
    # Imported here: no HTTP client is needed for a local directory.
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


# Image settings: routers resize images by them, and nodes encode images by them. Defaults are those
# of Qwen2VLImageProcessor in transformers.

# Values of model_type with image support. Other vision models are served for text only.
IMAGE_MODELS = frozenset({"qwen2_5_vl"})

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """Image settings of a model.

    Attributes:
        placeholder: token that the chat template writes for an image.
        patch_side: pixels per side of a patch.
        merge: patches per side of a token.
        frames: number of times that an image is repeated, as a video with a still picture.
        min_pixels, max_pixels: of a resized image.
        mean, std: of red, green, blue, where 1 is the brightest.
    """

    placeholder: int
    patch_side: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def token_side(self) -> int:
        """Pixels per side of the area of one token."""
        return self.patch_side * self.merge


def vision_files(directory: Path) -> VisionFiles | None:
    """Return the image settings, or None if images are not supported for the model.

    Raises:
        ConfigError: a file has invalid values.
    """
    config = _object(directory / "config.json")
    if config.get("model_type") not in IMAGE_MODELS:
        return None
    vision, processor = config.get("vision_config") or {}, _processor(directory)
    size = processor.get("size") or {}
    try:
        files = VisionFiles(
            placeholder=int(config.get("image_token_id", 151655)),
            patch_side=int(vision.get("patch_size", 14)),
            merge=int(vision.get("spatial_merge_size", 2)),
            frames=int(vision.get("temporal_patch_size", 2)),
            min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS),
            max_pixels=int(processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS),
            mean=tuple(map(float, processor.get("image_mean") or _MEAN)),
            std=tuple(map(float, processor.get("image_std") or _STD)),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{directory}: its image configuration is not supported: {error}"
        ) from error
    numbers = (files.patch_side, files.merge, files.frames, files.min_pixels, files.max_pixels)
    if min(numbers) < 1 or len(files.mean) != 3 or len(files.std) != 3 or 0.0 in files.std:
        raise ConfigError(f"{directory}: its image configuration is not supported: {files}")
    return files


def _processor(directory: Path) -> Mapping[str, Any]:
    """Return the image processor's settings. transformers 5 stores them with those for text."""
    own = directory / "preprocessor_config.json"
    if own.is_file():
        return _object(own)
    both = directory / "processor_config.json"
    return (_object(both).get("image_processor") or {}) if both.is_file() else {}


def _object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content

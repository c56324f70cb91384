"""What a model that sees images says of them, in the files of its checkpoint: read by routers,
which bring images to size, and by nodes, which encode them.

Defaults are those of Qwen2VLImageProcessor in transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# By model_type: those whose images are served. Of others that see, the texts are.
SERVED = frozenset({"qwen2_5_vl"})

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """
    placeholder: the token that the chat template writes for an image.
    patch_side: pixels a side of what the encoder begins with; merge: patches a side of a token.
    frames: so many times an image is seen, one after the other, as a film that stands still.
    min_pixels, max_pixels: of an image that is brought to size.
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
        """Pixels a side of what one token stands for."""
        return self.patch_side * self.merge


def vision_files(directory: Path) -> VisionFiles | None:
    """None of a model whose images are not served, if it sees any.

    Raises:
        ConfigError: a file says what cannot be used.
    """
    config = _object(directory / "config.json")
    if config.get("model_type") not in SERVED:
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
        raise ConfigError(f"{directory}: what it says of images cannot be used: {error}") from error
    numbers = (files.patch_side, files.merge, files.frames, files.min_pixels, files.max_pixels)
    if min(numbers) < 1 or len(files.mean) != 3 or len(files.std) != 3 or 0.0 in files.std:
        raise ConfigError(f"{directory}: what it says of images cannot be used: {files}")
    return files


def _processor(directory: Path) -> Mapping[str, Any]:
    """transformers 5 writes it beside that of texts, in one file."""
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

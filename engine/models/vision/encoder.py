"""A checkpoint's image encoder, computed by its unchanged class in transformers."""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.limits import MAX_PIXEL_BYTES
from common.model_directory import VisionFiles, vision_files
from common.requests.images import Image
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.refill import drain
from engine.models.vision.seeing import KEPT_BYTES, VisionTower
from engine.ranks import Group

_PREFIX = "visual."


class VisionInput:
    """The image encoder of a checkpoint before it is loaded."""

    def __init__(self, directory: Path, files: VisionFiles) -> None:
        self._directory = directory
        self.files = files

    @classmethod
    def of(cls, directory: Path) -> "VisionInput | None":
        """Return the encoder, or None if the checkpoint has none or images are not served.

        Raises:
            ConfigError: the checkpoint's image configuration is wrong.
        """
        files = vision_files(directory)
        return None if files is None else cls(directory, files)

    def stored(self) -> Collection[str]:
        """Return the names of its tensors.

        Raises:
            ConfigError: they do not match the configuration, or are quantised.
        """
        checkpoint = Checkpoint(self._directory)
        with torch.device("meta"):
            skeleton = _transformers_model(self._directory, torch.float32)
        wanted = {
            f"{_PREFIX}{name}": TensorRequest(tuple(each.shape))
            for name, each in skeleton.state_dict().items()
        }
        others = tuple(name for name in checkpoint.tensors if not name.startswith(_PREFIX))
        checkpoint.check(wanted, frozenset(), others)
        return list(wanted)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights and of cached embeddings."""
        tensors = Checkpoint(self._directory).tensors
        numbers = sum(math.prod(tensors[name].shape) for name in self.stored())
        return numbers * dtype.itemsize + KEPT_BYTES

    def config_hash(self) -> str:
        """Return a hash of everything other than weights that its embeddings depend on."""
        vision = Fields.of(self._directory / "config.json").nested("vision_config")
        return hashlib.sha256(f"{vision.sorted()} {self.files}".encode()).hexdigest()

    def load(
        self, device: torch.device, dtype: torch.dtype, group: Group | None = None
    ) -> VisionTower:
        """Load the encoder.

        Args:
            group: see VisionTower.
        Raises:
            ConfigError: tensors are missing, or do not match the configuration.
        """
        encoder = TransformersEncoder(self._directory, self.files, device, dtype)
        encoder.refill(self._weights())
        return VisionTower(encoder, group=group)

    def refill(self, seeing: VisionTower) -> None:
        """Replace its weights by those of this checkpoint, which has the same configuration."""
        seeing.refill(self._weights())

    def _weights(self) -> Mapping[str, Tensor]:
        checkpoint = Checkpoint(self._directory)
        return {name.removeprefix(_PREFIX): checkpoint.read(name) for name in self.stored()}


def _transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    """Return the class without weights. Imported here because transformers takes a second to import
    and text models do not need it."""
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    kind = Qwen2_5_VisionTransformerPretrainedModel
    return kind._from_config(config.vision_config, dtype=dtype)


class TransformersEncoder:
    """The encoder in transformers, see Encoder. It has no weights until `refill`."""

    def __init__(
        self, directory: Path, files: VisionFiles, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Only the order and the scale of the pixels are Baton's.
        self._model = _transformers_model(directory, dtype)
        self._model.to(device).eval().requires_grad_(False)
        self._files = files
        self._device, self._dtype = device, dtype

    def encode(self, image: Image) -> Tensor:
        merge = self._files.merge
        grid = torch.tensor([[1, image.rows * merge, image.columns * merge]])
        pixels = patches(image, self._files, self._device).to(self._dtype)
        with torch.inference_mode():
            encoded: Tensor = self._model(pixels, grid_thw=grid).pooler_output
        return encoded.to(self._dtype)

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def drain(self) -> None:
        drain(tuple(self._model.parameters()))

    def working_bytes(self) -> int:
        num_tokens = MAX_PIXEL_BYTES // (3 * self._files.token_side**2)
        rows = math.isqrt(num_tokens)
        columns = num_tokens // rows
        pixels = bytes(3 * self._files.token_side**2 * rows * columns)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.encode(Image(0, rows, columns, pixels))
        return torch.cuda.max_memory_allocated(self._device) - before


def patches(image: Image, files: VisionFiles, device: torch.device) -> Tensor:
    """Return patches, float32 [patches, numbers], with those of a token adjacent, as encoders
    expect them."""
    side, merge = files.patch_side, files.merge
    flat = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(device)
    mean, std = (torch.tensor(each, device=device) for each in (files.mean, files.std))
    scaled = flat.view(-1, 3).float().div_(255).sub_(mean).div_(std)
    apart = scaled.view(image.rows, merge, side, image.columns, merge, side, 3)
    by_patch = apart.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
    whole = by_patch.expand(*by_patch.shape[:5], files.frames, *by_patch.shape[6:])
    return whole.reshape(image.num_tokens * merge**2, -1)

"""A checkpoint's image encoder, computed by its unchanged class in transformers."""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.limits import MAX_PIXEL_BYTES
from common.model_directory import AreaSize, SquareSize, StretchedSize, VisionFiles, vision_files
from common.requests.images import Image
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.refill import drain
from engine.models.vision.seeing import KEPT_BYTES, VisionTower
from engine.ranks import Group


class VisionInput:
    """The image encoder of a checkpoint before it is loaded."""

    def __init__(self, directory: Path, files: VisionFiles) -> None:
        self._directory = directory
        self.files = files

    @classmethod
    def of(cls, directory: Path) -> "VisionInput | None":
        """Return the encoder, or None if the checkpoint has none or images are not supported.

        Raises:
            ConfigError: the checkpoint's image configuration is invalid.
        """
        files = vision_files(directory)
        return None if files is None else cls(directory, files)

    def stored(self) -> Collection[str]:
        """Return the names of its tensors.

        Raises:
            ConfigError: they do not match the configuration, or are quantised.
        """
        return list(self._stored_names().values())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights and of cached embeddings."""
        tensors = Checkpoint(self._directory).tensors
        numbers = sum(math.prod(tensors[name].shape) for name in self.stored())
        return numbers * dtype.itemsize + KEPT_BYTES

    def config_hash(self) -> str:
        """Return a hash of everything except weights on which its embeddings depend."""
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
        """Replace the weights by those of this checkpoint, which has the same configuration."""
        seeing.refill(self._weights())

    def _weights(self) -> Mapping[str, Tensor]:
        checkpoint = Checkpoint(self._directory)
        return {name: checkpoint.read(stored) for name, stored in self._stored_names().items()}

    def _stored_names(self) -> Mapping[str, str]:
        """Return the stored name of each tensor of the transformers class.

        Raises:
            ConfigError: see `stored`.
        """
        checkpoint = Checkpoint(self._directory)
        with torch.device("meta"):
            tensors = _transformers_model(self._directory, torch.float32).state_dict()
        names = {name: _stored_name(name, checkpoint.tensors) for name in tensors}
        wanted = {names[name]: TensorRequest(tuple(each.shape)) for name, each in tensors.items()}
        parts = {name.partition(".")[0] for name in tensors}
        others = (
            name
            for name in checkpoint.tensors
            if name.removeprefix("model.").partition(".")[0] not in parts
        )
        checkpoint.check(wanted, frozenset({".position_ids"}), tuple(others))
        return names


def _stored_name(name: str, stored: Collection[str]) -> str:
    """Return the stored name of a tensor of the transformers class, or `name`. Old checkpoints have
    other prefixes."""
    tower = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    spellings = (f"{model}{each}" for each in (name, tower) for model in ("", "model."))
    return next((each for each in spellings if each in stored), name)


def _transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    """Return the class without weights and without its decoder. Imported here, because transformers
    takes a second to import."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    text.layer_types = []
    model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)
    del model.language_model
    return model


class TransformersEncoder:
    """The encoder in transformers, see Encoder. It has no weights until `refill`."""

    def __init__(
        self, directory: Path, files: VisionFiles, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Baton changes only the order and the scale of the pixels.
        self._model = _transformers_model(directory, dtype)
        self._model.to(device).eval().requires_grad_(False)
        self._files = files
        self._device, self._dtype = device, dtype

    def encode(self, images: Sequence[Image]) -> Sequence[Tensor]:
        each = [encoder_inputs(image, self._files, self._device, self._dtype) for image in images]
        inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        with torch.inference_mode():
            encoded = self._model.get_image_features(**inputs)
            # By layer, then by image.
            made = (encoded.pooler_output, *encoded.get("deepstack_features", ()))
            by_image = zip(*made, strict=True)
            return [torch.cat(features, dim=1).to(self._dtype) for features in by_image]

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def drain(self) -> None:
        drain(tuple(self._model.parameters()))

    def tensors(self) -> Iterable[Tensor]:
        yield from self._model.parameters()

    def working_bytes(self) -> int:
        rows, columns = _largest(self._files)
        pixels = bytes(3 * self._files.token_side**2 * rows * columns)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.encode([Image(0, rows, columns, pixels)])
        return torch.cuda.max_memory_allocated(self._device) - before


def _largest(files: VisionFiles) -> tuple[int, int]:
    """Return rows and columns of an image with the most tokens."""
    if files.tokens_per_side:
        return files.tokens_per_side, files.tokens_per_side
    num_tokens = MAX_PIXEL_BYTES // (3 * files.token_side**2)
    rows = math.isqrt(num_tokens)
    return rows, num_tokens // rows


def encoder_inputs(
    image: Image, files: VisionFiles, device: torch.device, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Return the inputs that transformers' image processor creates for an image of this size."""
    flat = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(device)
    mean, std = (torch.tensor(each, device=device) for each in (files.mean, files.std))
    scaled = flat.view(-1, 3).float().div_(255).sub_(mean).div_(std)
    match files.size:
        case SquareSize(side=side) | StretchedSize(side=side):
            whole = scaled.view(1, side, side, 3).permute(0, 3, 1, 2)
            return {"pixel_values": whole.to(dtype)}
        case AreaSize():
            grid = torch.tensor([[1, image.rows * files.merge, image.columns * files.merge]])
            patches = _patches(scaled, image, files)
            return {"pixel_values": patches.to(dtype), "image_grid_thw": grid}


def _patches(scaled: Tensor, image: Image, files: VisionFiles) -> Tensor:
    """Return patches [patches, numbers]. The patches of a token are adjacent.

    Args:
        scaled: [pixels, 3].
    """
    side, merge = files.patch_side, files.merge
    apart = scaled.view(image.frames, image.rows, merge, side, image.columns, merge, side, 3)
    by_patch = apart.permute(1, 4, 2, 5, 7, 0, 3, 6)
    whole = by_patch.expand(*by_patch.shape[:5], files.frames, side, side)
    return whole.reshape(image.num_tokens * merge**2, -1)

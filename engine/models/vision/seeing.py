"""A checkpoint's image encoder, computed by its unchanged class in transformers, and embeddings of
images, cached up to a limit and otherwise encoded when a step needs them.

A forward requests the embeddings of the images with tokens in its chunk. They are usually in the
cache, because another thread has encoded them (encoder_thread.py). Otherwise the forward encodes
them, and takes longer. `MAX_PIXEL_BYTES` limits the size of each image.
"""

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import EngineFault
from common.limits import MAX_PIXEL_BYTES
from common.model_directory import AreaSize, SquareSize, StretchedSize, VisionFiles, vision_files
from common.requests.images import Image
from engine.batch.images import VisibleImage
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.refill import drain
from engine.ranks import Group

KEPT_BYTES = 256 << 20


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


class VisionEncoder:
    """The encoder in transformers. It has no weights until `refill`."""

    def __init__(
        self, directory: Path, files: VisionFiles, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Baton changes only the order and the scale of the pixels.
        self._model = _transformers_model(directory, dtype)
        self._model.to(device).eval().requires_grad_(False)
        self._files = files
        self._device, self._dtype = device, dtype

    def encode(self, images: Sequence[Image]) -> Sequence[Tensor]:
        """Return [num_tokens, hidden] for each image, on the model's device and in its dtype.

        Each feature for the first layers adds `hidden` columns. Callers must not change the result.
        There is at least one image.
        """
        each = [encoder_inputs(image, self._files, self._device, self._dtype) for image in images]
        inputs = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        with torch.inference_mode():
            encoded = self._model.get_image_features(**inputs)
            # By layer, then by image.
            made = (encoded.pooler_output, *encoded.get("deepstack_features", ()))
            by_image = zip(*made, strict=True)
            return [torch.cat(features, dim=1).to(self._dtype) for features in by_image]

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights. No image may be encoded meanwhile."""
        self._model.load_state_dict(weights)

    def drain(self) -> None:
        """Return the memory of the weights to the operating system, until `refill`."""
        drain(tuple(self._model.parameters()))

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that `refill` fills."""
        yield from self._model.parameters()

    def working_bytes(self) -> int:
        """Return the temporary GPU memory in bytes for encoding the largest image."""
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


@dataclass(slots=True)
class VisionCounts:
    """Counters of the image encoder.

    Attributes:
        seconds: time in calls of the encoder. A GPU may still be computing when a call returns.
    """

    encoded: int = 0
    found: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Vectors that the first layers add to their outputs for tokens of an image.

    Attributes:
        place: place of the first of these tokens in the step.
        by_layer: [tokens, layers, hidden].

    Source: DeepStack, Meng et al. 2024, as in Qwen3-VL.
    """

    place: int
    by_layer: Tensor

    def add_to(self, x: Tensor, layer: int) -> None:
        """Add the features to the output of a layer, [num_tokens, hidden]."""
        if layer < self.by_layer.shape[1]:
            x[self.place : self.place + len(self.by_layer)] += self.by_layer[:, layer]


class VisionTower:
    """The image encoder with a cache of embeddings. `embed` is for the forward stream, all other
    methods for any thread.

    Attributes:
        epoch: incremented whenever all embeddings are discarded.
    Args:
        most_bytes: limit of cached embeddings, which are stored by image content. The least
            recently used are evicted first.
        group: ranks with a ReceivingTower. None: this is the only rank.
    """

    def __init__(
        self, encoder: VisionEncoder, most_bytes: int = KEPT_BYTES, group: Group | None = None
    ) -> None:
        self._encoder = encoder
        self._most_bytes = most_bytes
        self._group = group
        self._encoder_lock = threading.Lock()  # acquired before the other one
        self._cache_lock = threading.Lock()
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._unused: set[bytes] = set()  # encoded by another thread, and not yet used by a forward
        self._drained = False  # whether the encoder has no weights
        self.num_bytes = 0
        self.epoch = 0
        self.counts = VisionCounts()

    def needed_bytes(self) -> int:
        """Return the maximum GPU memory in bytes, in addition to weights."""
        return self._most_bytes + self._encoder.working_bytes()

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights, and discard all embeddings."""
        with self._encoder_lock:
            self._forget()
            self._encoder.refill(weights)
            self._drained = False

    def drain(self) -> None:
        """Discard all embeddings, and return the memory of the weights to the operating system,
        until `refill`."""
        with self._encoder_lock:
            self._forget()
            self._drained = True
            self._encoder.drain()

    def tensors(self) -> Iterable[Tensor]:
        return self._encoder.tensors()

    def missing(self, images: Sequence[Image]) -> list[Image]:
        """Return the images whose embeddings are not cached, without duplicates. The others become
        the most recently used."""
        by_name = {image.name: image for image in images}
        with self._cache_lock:
            for name in by_name:
                if name in self._kept:
                    self._kept.move_to_end(name)
            return [image for name, image in by_name.items() if name not in self._kept]

    def encode(self, images: Sequence[Image], stream: torch.cuda.Stream | None) -> None:
        """Encode images in one call and cache their embeddings. Cached ones are not encoded again.

        Args:
            stream: the calling thread's own stream on the device. None on a CPU.
        """
        self._encoded({image.name: image for image in images}, stream, for_later=True)

    def kept(self, image: Image) -> Tensor | None:
        """Return cached embeddings, which must not be changed, or None."""
        with self._cache_lock:
            return self._kept.get(image.name)

    def put(self, image: Image, made: Tensor, epoch: int) -> None:
        """Cache complete embeddings from another node.

        Args:
            epoch: `epoch` when they were requested. Embeddings of older weights are dropped.
        """
        with self._cache_lock:
            if image.name not in self._kept and epoch == self.epoch:
                self._unused.add(image.name)
                self._keep(image.name, made)

    def embed(self, seen: Sequence[VisibleImage], x: Tensor) -> list[ImageFeatures]:
        """Write the embeddings of these tokens to their places in x.

        Args:
            x: [num_tokens, hidden], of a step. Modified in place.
        Returns:
            The features for the first layers. Empty if the encoder has none.
        Raises:
            EngineFault: an image is not cached, and the encoder has no weights.
        """
        features: list[ImageFeatures] = []
        for part in seen:
            assert part.image is not None
            made = self._embeddings(part.image)[part.first : part.last]
            if self._group is not None:
                self._group.broadcast(made)
            features += _placed(part, made, x)
        return features

    def _forget(self) -> None:
        with self._cache_lock:
            self._kept.clear()
            self._unused.clear()
            self.num_bytes = 0
            self.epoch += 1

    def _embeddings(self, image: Image) -> Tensor:
        kept = self._found(image.name)
        if kept is not None:
            return kept
        made = self._encoded({image.name: image})
        if not made:
            raise EngineFault("an image cannot be encoded: the encoder's weights are released")
        return made[image.name]

    def _found(self, name: bytes) -> Tensor | None:
        """Return cached embeddings, for the forward stream."""
        with self._cache_lock:
            kept = self._kept.get(name)
            if kept is None:
                return None
            self._kept.move_to_end(name)
            # Their first use, by the chunk for which they were encoded, is not a cache hit.
            self.counts.found += name not in self._unused
            self._unused.discard(name)
        if kept.is_cuda:  # another stream may have allocated the memory
            kept.record_stream(torch.cuda.current_stream(kept.device))
        return kept

    def _encoded(
        self,
        images: Mapping[bytes, Image],
        stream: torch.cuda.Stream | None = None,
        *,
        for_later: bool = False,
    ) -> dict[bytes, Tensor]:
        """Encode images by name, unless another thread has done so meanwhile. Return those that
        are cached afterwards: without weights, none is encoded.

        Args:
            for_later: no forward waits for them.
        """
        with self._encoder_lock:
            with self._cache_lock:
                made = {name: self._kept[name] for name in images if name in self._kept}
            names = [name for name in images if name not in made]
            if not names or self._drained:
                return made
            began = time.monotonic()
            wanted = [images[name] for name in names]
            if stream is None:
                embeddings = self._encoder.encode(wanted)
            else:
                with torch.cuda.stream(stream):
                    embeddings = self._encoder.encode(wanted)
                stream.synchronize()
            made |= zip(names, embeddings, strict=True)
            with self._cache_lock:
                self.counts.seconds += time.monotonic() - began
                self.counts.encoded += len(names)
                if for_later:
                    self._unused.update(names)
                for name in names:
                    self._keep(name, made[name])
        return made

    def _keep(self, name: bytes, made: Tensor) -> None:
        self._kept[name] = made
        self.num_bytes += made.nbytes
        while self.num_bytes > self._most_bytes and len(self._kept) > 1:
            evicted, gone = self._kept.popitem(last=False)
            self._unused.discard(evicted)
            self.num_bytes -= gone.nbytes


class ReceivingTower:
    """The embeddings of images on a rank without an encoder. Rank 0 broadcasts them.

    Args:
        num_features: number of the encoder's features per token.
    """

    def __init__(self, group: Group, num_features: int) -> None:
        self._group = group
        self._num_features = num_features

    def embed(self, seen: Sequence[VisibleImage], x: Tensor) -> list[ImageFeatures]:
        """Write embeddings as VisionTower does. The images themselves are not used."""
        features: list[ImageFeatures] = []
        for part in seen:
            empty = x.new_empty(part.last - part.first, (1 + self._num_features) * x.shape[1])
            features += _placed(part, self._group.broadcast(empty), x)
        return features


def _placed(part: VisibleImage, made: Tensor, x: Tensor) -> list[ImageFeatures]:
    """Write the embeddings of a part of an image into x. Return its features.

    Args:
        made: [tokens, hidden, and hidden for each feature].
    """
    by_layer = made.view(len(made), -1, x.shape[1])
    x[part.place : part.place + len(made)] = by_layer[:, 0]
    return [ImageFeatures(part.place, by_layer[:, 1:])] if by_layer.shape[1] > 1 else []


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
        encoder = VisionEncoder(self._directory, self.files, device, dtype)
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

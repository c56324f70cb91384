"""Embeddings of images, cached up to a limit and otherwise encoded when a step needs them.

A forward requests the embeddings of the images that its chunk has tokens of. Computing or
recomputing a prompt therefore needs no preparation, and images in the prefix cache are not encoded.
Encoding lengthens the forward. `MAX_PIXEL_BYTES` limits the size of each image.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.requests.images import Image
from engine.batch.images import VisibleImage
from engine.ranks import Group

KEPT_BYTES = 256 << 20


class VisionEncoder(Protocol):
    def encode(self, image: Image) -> Tensor:
        """Return [num_tokens, hidden], on the model's device and in its dtype. Features for the
        first layers follow, with `hidden` more columns for each. Callers must not change it."""
        ...

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights. Nothing may encode meanwhile."""
        ...

    def drain(self) -> None:
        """Return the memory of the weights to the system, until `refill`."""
        ...

    def working_bytes(self) -> int:
        """Return the GPU bytes that encoding the largest image takes temporarily."""
        ...


@dataclass(slots=True)
class VisionCounts:
    """Counters.

    Attributes:
        seconds: of the encoder's calls. A GPU may still be computing when a call returns.
    """

    encoded: int = 0
    found: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Vectors that the first layers add to their outputs for tokens of an image.

    Attributes:
        place: of the first of these tokens in the step.
        by_layer: [tokens, layers, hidden].

    Source: DeepStack, Meng et al. 2024, as in Qwen3-VL.
    """

    place: int
    by_layer: Tensor


class VisionTower:
    """The encoder with a cache of embeddings. For the forward stream. `counts` and `num_bytes` may
    be read by other threads.

    Args:
        most_bytes: limit of cached embeddings, which are stored by image content. The least
            recently used are evicted first.
        group: ranks whose other members have a ReceivingTower. None: this is the only rank.
    """

    def __init__(
        self, encoder: VisionEncoder, most_bytes: int = KEPT_BYTES, group: Group | None = None
    ) -> None:
        self._encoder = encoder
        self._most_bytes = most_bytes
        self._group = group
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0
        self.counts = VisionCounts()

    def needed_bytes(self) -> int:
        """Return the maximum of GPU bytes in addition to weights."""
        return self._most_bytes + self._encoder.working_bytes()

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights, and discard all embeddings made with the old ones."""
        self._forget()
        self._encoder.refill(weights)

    def drain(self) -> None:
        """Discard all embeddings, and return the memory of the weights to the system, until
        `refill`."""
        self._forget()
        self._encoder.drain()

    def embed(self, seen: Sequence[VisibleImage], x: Tensor) -> list[ImageFeatures]:
        """Write the embeddings of these tokens to their places.

        Args:
            x: [num_tokens, hidden], of a step. Changed in place.
        Returns:
            The features for the first layers. Empty if the encoder makes none.
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
        self._kept.clear()
        self.num_bytes = 0

    def _embeddings(self, image: Image) -> Tensor:
        name = image.name
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            self.counts.found += 1
            return kept
        began = time.monotonic()
        made = self._encoder.encode(image)
        self.counts.seconds += time.monotonic() - began
        self.counts.encoded += 1
        self._kept[name] = made
        self.num_bytes += made.nbytes
        while self.num_bytes > self._most_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.nbytes
        return made


class ReceivingTower:
    """The embeddings of images on a rank without an encoder. Rank 0 broadcasts them.

    Args:
        num_features: of the encoder, for each token.
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
    """Write the embeddings of a part of an image into x, and return its features.

    Args:
        made: [tokens, hidden, and hidden for each feature].
    """
    by_layer = made.view(len(made), -1, x.shape[1])
    x[part.place : part.place + len(made)] = by_layer[:, 0]
    return [ImageFeatures(part.place, by_layer[:, 1:])] if by_layer.shape[1] > 1 else []

"""The embeddings of images, as far as they are kept; the others are encoded when a step needs them.

A forward asks for those of the images that its chunk has tokens of: whoever computes a prompt, for
the first time or anew, needs nothing prepared, and what a prefix cache has is never encoded. The
forward is longer by the encoding of those images, none of which has more tokens than
`MAX_PIXEL_BYTES` are.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.requests.images import Image
from engine.batch.images import Seen

KEPT_BYTES = 256 << 20


class Encoder(Protocol):
    def encode(self, image: Image) -> Tensor:
        """[num_tokens, hidden], on the model's device and in its dtype; nobody changes it."""
        ...

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """These in the place of its own. Nobody encodes meanwhile."""
        ...

    def drain(self) -> None:
        """Gives the memory of its weights back to the system, until `refill`."""
        ...

    def working_bytes(self) -> int:
        """Of a GPU, that the largest image takes while it is encoded."""
        ...


@dataclass(slots=True)
class Counts:
    """seconds: of the encoder's calls; a GPU may still be at work when one returns."""

    encoded: int = 0
    found: int = 0
    seconds: float = 0.0


class Seeing:
    """For the forward stream; `counts` and `num_bytes` may be read elsewhere.

    Args:
        most_bytes: of embeddings that are kept, by the content of their image; what was needed
            longest ago goes first.
    """

    def __init__(self, encoder: Encoder, most_bytes: int = KEPT_BYTES) -> None:
        self._encoder = encoder
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0
        self.counts = Counts()

    def needed_bytes(self) -> int:
        """Of a GPU, at most, beside weights."""
        return self._most_bytes + self._encoder.working_bytes()

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Encodes with these from now on; nothing is kept of what others have made."""
        self._forget()
        self._encoder.refill(weights)

    def drain(self) -> None:
        """Nothing is kept, and weights are given back to the system, until `refill`."""
        self._forget()
        self._encoder.drain()

    def embed(self, seen: Sequence[Seen], x: Tensor) -> None:
        """Puts the embeddings of these tokens in their places.

        Args:
            x: [num_tokens, hidden], of a step; changed in place.
        """
        for part in seen:
            rows = x[part.place : part.place + part.last - part.first]
            rows.copy_(self._embeddings(part.image)[part.first : part.last])

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

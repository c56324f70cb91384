"""Images and input embeddings in the rows of a step, and the rotary positions of image tokens.

In some models, image tokens have positions like text. In others, positions are axial: tokens of an
image differ by row and column. The image takes as many positions as its longer side has tokens.
Positions after an image are therefore smaller than token indices. Tokens of a video also differ by
time, and a video takes as many positions as its longest axis.

Source: Qwen2-VL, Wang et al. 2024, section 2.1 (M-RoPE).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.requests.images import Image
from engine.batch.batch import Ints, ScheduleBatch
from engine.batch.image_tokens import in_vocabulary
from engine.batch.request import Request
from engine.batch.table import SlotTable

AXES = 3  # time, height, width


@dataclass(frozen=True, slots=True, eq=False)
class VisibleImage:
    """The tokens [first, last) of an image in a step. They start at token `place` of the step.

    row: row of the step whose request has the image.
    at: index of token `first` in the request.
    image: None on a rank that receives the image's embeddings from another rank.
    """

    image: Image | None
    first: int
    last: int
    place: int
    row: int = 0
    at: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VisibleEmbeddings:
    """Input embeddings of consecutive tokens, float32 [any, hidden] in host memory. They start at
    token `place` of the step."""

    values: Tensor
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """Token ids and positions of a step with images or embeddings. See ForwardBatch."""

    token_ids: Ints
    positions: Ints
    seen: tuple[VisibleImage | VisibleEmbeddings, ...]


class RowImages:
    """Images and input embeddings of the requests in a table's slots. Engine thread only.

    Attributes:
        empty: whether no slot has images or embeddings.
    Args:
        axial: whether image tokens are positioned by row and column instead of like text.
    """

    def __init__(self, table: SlotTable, axial: bool) -> None:
        self._table = table
        self._axial = axial
        self._images: dict[int, tuple[Image, ...]] = {}  # by slot
        self._given: dict[int, Tensor] = {}  # by slot, float32 [prompt tokens, hidden]
        self._have = np.zeros(table.num_slots, np.bool_)
        # Added to positions after the last image.
        self._shift = np.zeros(table.num_slots, np.int32)
        self.empty = True

    def among(self, batch: ScheduleBatch) -> bool:
        """Return whether a row of the step has images or embeddings."""
        return bool(np.count_nonzero(self._have[batch.slots]))

    def shown(
        self, batch: ScheduleBatch, query_starts: Ints, token_ids: Ints, positions: Ints
    ) -> EncodedImage:
        """Return the step's tokens and positions with images and embeddings applied.

        Args:
            query_starts, token_ids, positions: fields of ForwardBatch, built as if there were
                no images.
        """
        counts = batch.ends - batch.starts
        moved = positions + np.repeat(self._shift[batch.slots], counts)
        known = np.where(in_vocabulary(token_ids), token_ids, np.int32(0))
        seen: list[VisibleImage | VisibleEmbeddings] = []
        for row in np.flatnonzero(self._have[batch.slots]).tolist():
            slot = int(batch.slots[row])
            start, end, place = (int(x[row]) for x in (batch.starts, batch.ends, query_starts))
            if (given := self._given.get(slot)) is not None:
                if start < len(given):
                    seen.append(VisibleEmbeddings(given[start:end], place))
                continue
            images = self._images[slot]
            if start >= images[-1].end:
                continue
            if self._axial:
                moved = np.tile(moved, (AXES, 1)) if moved.ndim == 1 else moved
                moved[:, place : place + end - start] = positions_of(images, start, end)
            seen += _seen(images, start, end, place, row)
        return EncodedImage(known, moved, tuple(seen))

    def acquire(self, slot: int, request: Request) -> None:
        """Assign a slot to the request. If `empty`, this may be skipped for a request without
        images and embeddings."""
        # The pixels and embeddings of requests that left the table can be freed: a launched step
        # holds its own reference.
        live, spec = self._table.live, request.spec
        self._images = {each: images for each, images in self._images.items() if live[each]}
        self._given = {each: given for each, given in self._given.items() if live[each]}
        self._images.pop(slot, None)
        self._given.pop(slot, None)
        self._have[slot] = bool(spec.images) or spec.input_embeddings is not None
        self._shift[slot] = shift_of(spec.images) if self._axial else 0
        if spec.images:
            self._images[slot] = spec.images
        if (given := spec.input_embeddings) is not None:
            values = bytearray(given.values)  # a copy, because torch may write to it
            rows = torch.frombuffer(values, dtype=torch.float32).view(given.num_tokens, -1)
            self._given[slot] = rows
        self.empty = not (self._images or self._given)
        if self.empty:
            self._have[:] = False
            self._shift[:] = 0


def shift_of(images: Sequence[Image]) -> int:
    """Return position minus token index after these images."""
    *_, (_, _, shift) = [(None, 0, 0), *_placed(images)]
    return shift


def positions_of(images: Sequence[Image], start: int, end: int) -> NDArray[np.int32]:
    """Return the positions of the tokens [start, end) of a prompt with images: [3, end - start]."""
    index = np.arange(start, end, dtype=np.int32)
    positions = np.tile(index, (AXES, 1))
    for image, first, shift in _placed(images):
        inside = slice(max(image.at - start, 0), max(image.end - start, 0))
        nth = index[inside] - image.at
        rows, columns = np.divmod(nth, np.int32(image.columns))
        positions[:, inside] = first + np.stack((np.full_like(nth, image.time or 0), rows, columns))
        positions[:, inside.stop :] = index[inside.stop :] + shift
    return positions


def _placed(images: Sequence[Image]) -> Iterator[tuple[Image, int, int]]:
    """Yield each image with its first position, and with position minus token index after it."""
    first = shift = 0
    for image in images:
        if image.time is None:
            first = image.at + shift
        after = first + max(image.rows, image.columns, (image.time or 0) + 1)
        shift = after - image.end
        yield image, first, shift


def _seen(
    images: Sequence[Image], start: int, end: int, place: int, row: int
) -> list[VisibleImage]:
    """Return the visible images of a row that computes the tokens [start, end). Token `start` is
    token `place` of the step."""
    return [
        VisibleImage(image, first - image.at, last - image.at, place + first - start, row, first)
        for image in images
        if (first := max(image.at, start)) < (last := min(image.end, end))
    ]

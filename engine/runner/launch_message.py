"""A step as bytes, from rank 0 to other ranks: a small header, and one block with its tensors.

A rank needs nothing else to run the step. Adapters are sent by identity, because each rank has its
own copies. Images are sent by position only, because another rank encodes them.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from common.requests.namespace import AdapterId
from engine.adapters.adapters import AdapterBatch
from engine.adapters.stored import LoraAdapter
from engine.batch.batch import PageCopies
from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.images import VisibleEmbeddings, VisibleImage
from engine.batch.upload import HostColumn, pack, packed_bytes
from engine.runner.step import SpeculativeStep, Step
from engine.sampling.heads import HeadInputs
from kernels.adapters.low_rank import TokensBySlot

Block: TypeAlias = NDArray[np.uint8]


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The header of an encoded step.

    Attributes:
        columns: dtype, shape and offset in the block, in bytes, by part of the step.
        seen: number of tokens of each visible image, and `place`, `row` and `at` of VisibleImage.
        given: token positions in the step at which input embeddings begin.
        chosen, num_prompt: see HeadInputs.
        fills: adapter slots to fill.
        graph, num_decodes, most, num_guessed: see Step and its parts.
        extends: see ForwardBatch.
    """

    columns: tuple[tuple[tuple[str, tuple[int, ...], int], ...], ...]
    num_decodes: int
    extends: tuple[tuple[int, int], ...]
    graph: GraphShape | None
    most: int
    num_guessed: int
    seen: tuple[tuple[int, int, int, int], ...]
    given: tuple[int, ...]
    chosen: bool
    num_prompt: int
    fills: tuple[tuple[int, AdapterId], ...]


def block_bytes(step: Step) -> int:
    """Return the size of the block that `encode` needs."""
    return packed_bytes([column for part in _parts(step) for column in part])


def encode(step: Step, block: Block) -> Launch:
    """Copy the columns of a step into a block, and return the header."""
    rows, speculated = step.rows, step.speculated
    fills = () if step.adapters is None else step.adapters.fills
    parts = _parts(step)
    starts = iter(pack([column for part in parts for column in part], block))
    return Launch(
        tuple(
            tuple((column.dtype.name, column.shape, next(starts)) for column in part)
            for part in parts
        ),
        0 if rows is None else rows.num_decodes,
        () if rows is None else rows.extends,
        step.graph,
        speculated.most,
        speculated.num_guessed,
        tuple((one.last - one.first, one.place, one.row, one.at) for one in _images(rows)),
        tuple(one.place for one in _given(rows)),
        step.heads.chosen,
        step.heads.num_prompt,
        tuple((slot, adapter.id) for slot, adapter in fills),
    )


def decode(launch: Launch, block: Block, adapter: Callable[[AdapterId], LoraAdapter]) -> Step:
    """Return the step. Its columns are views of the block.

    Args:
        adapter: returns this rank's part of an adapter.
    """
    rows, given, early, adapters, scored, swap_out, swap_in = (
        [_view(block, *each) for each in part] for part in launch.columns
    )
    images = (VisibleImage(None, 0, *one) for one in launch.seen)
    embeddings = (
        VisibleEmbeddings(torch.from_numpy(values), place)
        for values, place in zip(given, launch.given, strict=True)
    )
    seen: tuple[VisibleImage | VisibleEmbeddings, ...] = (*images, *embeddings)
    return Step(
        HostBatch.of(rows, launch.num_decodes, seen, launch.extends) if rows else None,
        SpeculativeStep(early, launch.most, launch.num_guessed),
        AdapterBatch(
            TokensBySlot(*map(torch.from_numpy, adapters)) if adapters else None,
            tuple((slot, adapter(identity)) for slot, identity in launch.fills),
        )
        if adapters or launch.fills
        else None,
        HeadInputs(launch.chosen, launch.num_prompt).on_device([*map(torch.from_numpy, scored)]),
        launch.graph,
        _copies(swap_out),
        _copies(swap_in),
    )


def _parts(step: Step) -> Sequence[Sequence[HostColumn]]:
    """Return the columns of a step, by part, in the order in which `decode` reads them."""
    return (
        () if step.rows is None else step.rows.columns(),
        [one.values.numpy() for one in _given(step.rows)],
        step.speculated.early,
        step.adapter_columns,
        step.heads.columns(),
        _pages(step.swap_out),
        _pages(step.swap_in),
    )


def _pages(copies: PageCopies | None) -> Sequence[HostColumn]:
    return () if copies is None else (copies.device_pages, copies.host_pages)


def _copies(pages: Sequence[HostColumn]) -> PageCopies | None:
    return PageCopies(*pages) if pages else None


def _view(block: Block, name: str, shape: tuple[int, ...], start: int) -> HostColumn:
    return np.ndarray(shape, name, block, start)


def _images(rows: HostBatch | None) -> Sequence[VisibleImage]:
    seen = () if rows is None else rows.seen
    return [one for one in seen if isinstance(one, VisibleImage)]


def _given(rows: HostBatch | None) -> Sequence[VisibleEmbeddings]:
    seen = () if rows is None else rows.seen
    return [one for one in seen if isinstance(one, VisibleEmbeddings)]

"""A step as bytes, from rank 0 to other ranks: a small header, and one block with its tensors.

A rank needs nothing else to run the step. Adapters are sent by identity, because each rank has its
own copies. Images are sent by position only, because another rank encodes them.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.requests.namespace import AdapterId
from engine.adapters.adapters import AdapterBatch
from engine.adapters.stored import LoraAdapter
from engine.batch.batch import PageCopies
from engine.batch.early_rows import PrestagedRows
from engine.batch.forward import ForwardBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.images import VisibleEmbeddings, VisibleImage
from engine.batch.upload import pack, packed_bytes
from engine.batch.verified_rows import VerifiedRows
from engine.runner.speculated import SpeculativeStep
from engine.runner.step import Step
from engine.sampling.heads import HeadInputs
from kernels.adapters.low_rank import TokensBySlot

Block: TypeAlias = NDArray[np.uint8]

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StepParts(msgspec.Struct, frozen=True, array_like=True):
    """Number of tensors of each part of a step, in order."""

    rows: int
    given: int
    early: int
    verified: int
    adapters: int
    scored: int
    swap_out: int
    swap_in: int


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The header of an encoded step.

    Attributes:
        tensors: dtype, shape and offset in the block, in bytes.
        seen: number of tokens of each visible image, and `place`, `row` and `at` of VisibleImage.
        given: token positions in the step at which input embeddings begin.
        chosen, num_prompt: see HeadInputs.
        fills: adapter slots to fill.
        graph, num_decodes, to_guess: see Step and its parts.
        extends: see ForwardBatch.
    """

    tensors: tuple[tuple[str, tuple[int, ...], int], ...]
    parts: StepParts
    num_decodes: int
    extends: tuple[tuple[int, int], ...]
    graph: GraphShape | None
    to_guess: tuple[int, ...]
    seen: tuple[tuple[int, int, int, int], ...]
    given: tuple[int, ...]
    chosen: bool
    num_prompt: int
    fills: tuple[tuple[int, AdapterId], ...]


def block_bytes(step: Step) -> int:
    """Return the size of the block that `encode` needs."""
    return packed_bytes([tensor for part in _parts(step) for tensor in part])


def encode(step: Step, block: Block) -> Launch:
    """Copy the tensors of a step into a block, and return the header."""
    rows, speculated, adapters = step.rows, step.speculated, step.adapters
    parts = _parts(step)
    tensors = [tensor for part in parts for tensor in part]
    starts = pack(tensors, block)
    return Launch(
        tuple(
            (_NAMES[tensor.dtype], tuple(tensor.shape), start)
            for tensor, start in zip(tensors, starts, strict=True)
        ),
        StepParts(*map(len, parts)),
        0 if rows is None else rows.num_decodes,
        () if rows is None else rows.extends,
        step.graph,
        speculated.to_guess,
        tuple((one.last - one.first, one.place, one.row, one.at) for one in _images(rows)),
        tuple(one.place for one in _given(rows)),
        step.heads.chosen,
        step.heads.num_prompt,
        tuple((slot, adapter.id) for slot, adapter in adapters.fills),
    )


def decode(launch: Launch, block: Block, adapter: Callable[[AdapterId], LoraAdapter]) -> Step:
    """Return the step. Its tensors are views of the block.

    Args:
        adapter: returns this rank's part of an adapter.
    """
    packed = torch.from_numpy(block)
    views = iter([_view(packed, *each) for each in launch.tensors])
    rows, given, early, verified, adapters, scored, swap_out, swap_in = (
        [*islice(views, count)] for count in msgspec.structs.astuple(launch.parts)
    )
    images = (VisibleImage(None, 0, *one) for one in launch.seen)
    embeddings = (VisibleEmbeddings(*one) for one in zip(given, launch.given, strict=True))
    seen: tuple[VisibleImage | VisibleEmbeddings, ...] = (*images, *embeddings)
    return Step(
        ForwardBatch.of(rows, launch.num_decodes, seen, launch.extends) if rows else None,
        SpeculativeStep(
            PrestagedRows(*early) if early else None,
            VerifiedRows(*verified) if verified else None,
            launch.to_guess,
        ),
        AdapterBatch(
            TokensBySlot(*adapters) if adapters else None,
            tuple((slot, adapter(identity)) for slot, identity in launch.fills),
        ),
        HeadInputs(launch.chosen, launch.num_prompt).on_device(scored),
        launch.graph,
        _copies(swap_out),
        _copies(swap_in),
    )


def _parts(step: Step) -> Sequence[Sequence[Tensor]]:
    """Return the tensors of a step, by part in the order of StepParts."""
    early, verified = step.speculated.early, step.speculated.verified
    return (
        () if step.rows is None else step.rows.tensors(),
        [one.values for one in _given(step.rows)],
        () if early is None else early.tensors(),
        () if verified is None else verified.tensors(),
        step.adapters.tensors(),
        step.heads.tensors(),
        _pages(step.swap_out),
        _pages(step.swap_in),
    )


def _pages(copies: PageCopies | None) -> Sequence[Tensor]:
    if copies is None:
        return ()
    return [torch.from_numpy(pages) for pages in (copies.device_pages, copies.host_pages)]


def _copies(pages: Sequence[Tensor]) -> PageCopies | None:
    return PageCopies(*(each.numpy() for each in pages)) if pages else None


def _view(packed: Tensor, name: str, shape: tuple[int, ...], start: int) -> Tensor:
    dtype = _DTYPES[name]
    num_bytes = math.prod(shape) * dtype.itemsize
    return packed[start : start + num_bytes].view(dtype).view(shape)


def _images(rows: ForwardBatch | None) -> Sequence[VisibleImage]:
    seen = () if rows is None else rows.seen
    return [one for one in seen if isinstance(one, VisibleImage)]


def _given(rows: ForwardBatch | None) -> Sequence[VisibleEmbeddings]:
    seen = () if rows is None else rows.seen
    return [one for one in seen if isinstance(one, VisibleEmbeddings)]

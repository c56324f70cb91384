"""Copies of whole pages between pools: from device to host memory and back."""

from itertools import pairwise

from torch import Tensor

# Bytes of one copy. Copies in one direction take turns: 256 MiB would occupy the copy engine for 5
# ms and delay the inputs of the next step.
MAX_COPY_BYTES = 4 << 20


def copy_pages(source: Tensor, source_pages: Tensor, target: Tensor, target_pages: Tensor) -> None:
    """Copy target[target_pages[i]] = source[source_pages[i]] for all i, asynchronously on a device.

    Consecutive pages on both sides are copied together, up to MAX_COPY_BYTES. The pools must not
    overlap.

    Args:
        source, target: contiguous [num_pages, ...], of equal dtype and page shape. Host memory is
            pinned if the other side is a device.
        source_pages, target_pages: int [n] in host memory, in range. target_pages are distinct.
    Raises:
        ValueError: wrong shapes, or ids that are not in host memory.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"pages differ: {source.dtype} {tuple(source.shape[1:])} and "
            f"{target.dtype} {tuple(target.shape[1:])}"
        )
    if source_pages.shape != target_pages.shape or source_pages.ndim != 1:
        raise ValueError(
            f"page ids: [n] twice, got {tuple(source_pages.shape)} and {tuple(target_pages.shape)}"
        )
    if source_pages.device.type != "cpu" or target_pages.device.type != "cpu":
        raise ValueError("page ids are needed in host memory")
    if not len(source_pages):
        return
    breaks = (source_pages.diff() != 1) | (target_pages.diff() != 1)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(source_pages)]
    sources, targets = source_pages.tolist(), target_pages.tolist()
    for start, end in pairwise(starts):
        length = end - start
        _copy(source.narrow(0, sources[start], length), target.narrow(0, targets[start], length))


def _copy(source: Tensor, target: Tensor) -> None:
    size = MAX_COPY_BYTES // source.element_size()
    part, into = source.view(-1), target.view(-1)
    for start in range(0, part.numel(), size):
        into[start : start + size].copy_(part[start : start + size], non_blocking=True)

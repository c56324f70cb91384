"""Replacement of the values in a model's tensors, in place, and release of their memory.

Objects that refer to these tensors or their addresses see the new values.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor

from common.errors import EngineFault
from kernels.cpu.memory import release_memory
from kernels.cuda.virtual_memory import Region, VirtualMemory

T = TypeVar("T")

_EXTENT_BYTES = 64 << 20  # memory that is needed twice at a time, unless a tensor is larger
_ALIGNMENT = 512  # bytes, as in torch


def refill(present: object, fresh: object) -> None:
    """Copy all tensors of `fresh` over those of `present`, which has the same structure. No forward
    may use either meanwhile.

    Raises:
        EngineFault: they differ in more than values. Some may be copied already.
    """
    with torch.inference_mode():
        _refill(present, fresh, type(present).__name__)


def drain(present: object) -> None:
    """Return the memory of all host tensors of `present` to the operating system. They keep their
    addresses, and `refill` fills them again. No forward may use them meanwhile."""
    if isinstance(present, Tensor) and present.device.type == "cpu":
        release_memory(present)
    elif isinstance(present, tuple | list):
        for part in present:
            drain(part)
    elif is_dataclass(present):
        for each in fields(present):
            part = getattr(present, each.name)
            if isinstance(part, Tensor) and part.is_mkldnn:
                object.__setattr__(present, each.name, torch.empty(0))
            else:
                drain(part)


def found(kind: type[T], within: object) -> Iterator[T]:
    """Yield all objects of a kind inside dataclasses and sequences, in order."""
    if isinstance(within, kind):
        yield within
    elif isinstance(within, tuple | list):
        for part in within:
            yield from found(kind, part)
    elif is_dataclass(within):
        for each in fields(within):
            yield from found(kind, getattr(within, each.name))


def relocated(tensors: Iterable[Tensor], memory: VirtualMemory) -> Region:
    """Move tensors of a device into a region, and return the region. They stay the same objects
    with the same values, and tensors that shared memory still do.

    No other object may have recorded their addresses, and no forward may use them meanwhile.

    Raises:
        CudaError: there is not enough memory. Some tensors are already moved.
    """
    sharing: dict[int, list[Tensor]] = {}  # by address of their memory
    for each in tensors:
        if each.untyped_storage().nbytes():
            sharing.setdefault(each.untyped_storage().data_ptr(), []).append(each)
    sizes = [_aligned(some[0].untyped_storage().nbytes()) for some in sharing.values()]
    region, start = memory.reserve(sum(sizes), _EXTENT_BYTES), 0
    for some, size in zip(sharing.values(), sizes, strict=True):
        if start + size > region.mapped_bytes:
            torch.cuda.empty_cache()  # frees the old memory of tensors moved so far
            region.map(start + size)
        _move(some, region.tensor(start, size))
        start += size
    torch.cuda.empty_cache()
    return region


@torch.inference_mode()
def _move(tensors: Sequence[Tensor], place: Tensor) -> None:
    """Move tensors that share memory.

    Args:
        place: uint8, at least as large.
    """
    before = tensors[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=place.device).set_(before)
    place[: len(whole)].copy_(whole)
    for each in tensors:
        there = each.storage_offset(), each.size(), each.stride()
        each.set_(place.untyped_storage(), *there)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _refill(present: object, fresh: object, place: str) -> None:
    if present is fresh:
        return
    if type(present) is not type(fresh):
        raise _differ(place)
    if isinstance(present, Tensor) and isinstance(fresh, Tensor):
        here, there = ((x.shape, x.dtype, x.device) for x in (present, fresh))
        if here != there:
            raise _differ(place)
        present.copy_(fresh)
    elif is_dataclass(present):
        for each in fields(present):
            parts = getattr(present, each.name), getattr(fresh, each.name)
            if isinstance(parts[1], Tensor) and parts[1].is_mkldnn:
                # An opaque tensor: no object can have recorded its address, and its memory cannot
                # be written.
                object.__setattr__(present, each.name, parts[1])
            else:
                _refill(*parts, f"{place}.{each.name}")
    elif isinstance(present, tuple | list) and isinstance(fresh, tuple | list):
        if len(present) != len(fresh):
            raise _differ(place)
        for number, pair in enumerate(zip(present, fresh, strict=True)):
            _refill(*pair, f"{place}[{number}]")
    elif present != fresh:
        raise _differ(place)


def _differ(place: str) -> EngineFault:
    return EngineFault(f"the structure of the new weights differs, at {place}")

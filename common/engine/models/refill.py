"""Other numbers in the tensors of a model that is there: whoever holds these, or has noted where
they are, computes with them from then on."""

from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from common.errors import EngineFault


def refill(present: object, fresh: object) -> None:
    """Copies all tensors of `fresh` to their places in `present`, which is made of the same parts.
    Nothing may compute with either meanwhile.

    Raises:
        EngineFault: they differ in more than numbers; some of them may be copied already.
    """
    with torch.inference_mode():
        _refill(present, fresh, type(present).__name__)


def _refill(present: object, fresh: object, place: str) -> None:
    if present is fresh:
        return
    if type(present) is not type(fresh):
        raise _differ(place)
    if isinstance(present, Tensor) and isinstance(fresh, Tensor):
        _copy(present, fresh, place)
    elif is_dataclass(present):
        for each in fields(present):
            _refill_field(present, fresh, each.name, f"{place}.{each.name}")
    elif isinstance(present, tuple | list) and isinstance(fresh, tuple | list):
        if len(present) != len(fresh):
            raise _differ(place)
        for number, pair in enumerate(zip(present, fresh, strict=True)):
            _refill(*pair, f"{place}[{number}]")
    elif present != fresh:
        raise _differ(place)


def _refill_field(owner: object, other: object, name: str, place: str) -> None:
    present, fresh = getattr(owner, name), getattr(other, name)
    if isinstance(present, Tensor) and present.is_mkldnn:
        # Opaque: nobody can have noted its address, and nobody can write to it.
        object.__setattr__(owner, name, fresh)
    else:
        _refill(present, fresh, place)


def _copy(present: Tensor, fresh: Tensor, place: str) -> None:
    if (present.shape, present.dtype, present.device) != (fresh.shape, fresh.dtype, fresh.device):
        raise _differ(place)
    present.copy_(fresh)


def _differ(place: str) -> EngineFault:
    return EngineFault(f"the weights differ in more than numbers, at {place}")

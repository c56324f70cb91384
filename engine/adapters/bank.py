"""The adapters on the device: for each of the model's products a pair of matrices per slot, and
their contribution to a step.

Forward stream only. The caller knows which adapter is in which slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.adapters.stored import LoraAdapter
from engine.models.linear import Linear, Product
from kernels.adapters.low_rank import LEAST_RANK, TokensBySlot, add_low_rank


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The matrices for one product, as `add_low_rank` takes them."""

    modules: tuple[str, ...]
    parts: tuple[int, ...]
    down: Tensor
    up: Tensor


class AdapterBank:
    """The device memory of adapters.

    Args:
        num_slots: 0: no memory is allocated.
        max_rank: of an adapter.
    """

    def __init__(
        self,
        products: Sequence[Product],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots
        self._rank = held_rank(max_rank)
        self._places: dict[Linear, _Place] = {}
        for product in products if num_slots else ():
            parts = tuple(product.modules.values())
            down = (num_slots, len(parts) * self._rank, product.inputs)
            up = (num_slots, sum(parts), self._rank)
            self._places[product.linear] = _Place(
                tuple(product.modules),
                parts,
                torch.zeros(down, dtype=dtype, device=device),
                torch.zeros(up, dtype=dtype, device=device),
            )

    def fill(self, slot: int, adapter: LoraAdapter) -> None:
        """Copy an adapter into a slot, in place of the previous one."""
        rank = self._rank
        for place in self._places.values():
            place.down[slot].zero_()
            place.up[slot].zero_()
            first = 0
            for part, (module, outputs) in enumerate(zip(place.modules, place.parts, strict=True)):
                pair = adapter.pairs.get(module)
                if pair is not None:
                    rows = part * rank, part * rank + pair.rank
                    place.down[slot, slice(*rows)].copy_(pair.down, non_blocking=True)
                    mine = place.up[slot, first : first + outputs, : pair.rank]
                    mine.copy_(pair.up, non_blocking=True)
                first += outputs

    def adapted(self, tokens: TokensBySlot) -> "AdapterStep":
        """Return the adapters of a step as the forward uses them.

        Args:
            tokens: of a step, on the device.
        """
        return AdapterStep(self._places, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStep:
    """The adapters of a step, see Adapted."""

    places: dict[Linear, _Place]
    tokens: TokensBySlot

    def add(self, product: Linear, x: Tensor, y: Tensor) -> None:
        place = self.places.get(product)
        if place is not None:
            add_low_rank(y, x, place.down, place.up, self.tokens, place.parts)


def held_rank(max_rank: int) -> int:
    """Return the rank that kernels use: the next power of two."""
    return max(LEAST_RANK, 1 << (max_rank - 1).bit_length())


def bank_bytes(
    products: Sequence[Product], num_slots: int, max_rank: int, dtype: torch.dtype
) -> int:
    """Return the device memory of a bank in bytes."""
    numbers = sum(
        len(product.modules) * product.inputs + sum(product.modules.values())
        for product in products
    )
    return num_slots * held_rank(max_rank) * numbers * dtype.itemsize

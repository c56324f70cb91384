"""The adapters of one engine: held by requests, in device slots, and in steps.

    requested --hold--> in host memory --take_slot--> may be computed --release--> done

A request holds its adapter from admission until its end, and from some point on also a device slot.
Unloading the adapter does not affect the request. A slot is filled on the forward stream before the
step that needs it. All steps that used another adapter in that slot have then run.

`tokens_by_slot` groups a step's tokens by adapter for the low-rank products.

An adapter keeps its device slot while a request uses it. After that, the slot may be reassigned,
least recently used first. `AdapterBank` has a pair of matrices per slot for each of the model's
products. It is used on the forward stream only, and does not know which adapter is in which slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import LoraConfig
from common.errors import ConfigError, ServingError
from common.requests.namespace import NO_ADAPTER, AdapterId
from engine.adapters.library import AdapterCache, AdapterDirectory, AdapterSource
from engine.adapters.stored import AdapterLimits, AdapterReader, LoraAdapter
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn
from engine.models import Model
from engine.models.linear import Linear, Product
from kernels.adapters.low_rank import LEAST_RANK, TILE_ROWS, TokensBySlot, add_low_rank


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The matrices of all slots for one product, as arguments of `add_low_rank`."""

    modules: tuple[str, ...]
    parts: tuple[int, ...]
    down: Tensor
    up: Tensor


class AdapterBank:
    """The device memory of adapters.

    Args:
        num_slots: 0: no memory is allocated.
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

    @property
    def num_bytes(self) -> int:
        """Return the device memory of all slots in bytes."""
        return sum(place.down.nbytes + place.up.nbytes for place in self._places.values())

    def fill(self, slot: int, adapter: LoraAdapter) -> None:
        """Copy an adapter into a slot. It replaces the previous one."""
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
            tokens: tokens of a step, on the device.
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


class AdapterSlots:
    """The assignment of adapters to device slots. Engine thread only."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[AdapterId, int] = {}
        self._users: dict[AdapterId, int] = {}  # requests per adapter in use
        self._idle: dict[AdapterId, None] = {}  # adapters not in use, least recently used first

    @property
    def num_used(self) -> int:
        """Number of slots in use by requests."""
        return len(self._users)

    def slot_of(self, adapter: AdapterId) -> int:
        """Return the slot of an adapter in use."""
        return self._slots[adapter]

    def take(self, adapter: AdapterId) -> tuple[int, bool] | None:
        """Assign a slot for one more request.

        Returns:
            The slot, and whether the adapter must still be copied into it. None if all slots are in
                use.
        """
        fresh = adapter not in self._slots
        if fresh:
            if not self._free:
                oldest = next(iter(self._idle), None)
                if oldest is None:
                    return None
                del self._idle[oldest]
                self._free.append(self._slots.pop(oldest))
            self._slots[adapter] = self._free.pop()
        self._idle.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slots[adapter], fresh

    def drop(self, adapter: AdapterId) -> None:
        """Release one request's use of the adapter's slot."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None


def tokens_by_slot(slots: NDArray[np.integer], num_slots: int) -> TokensBySlot:
    """Return the tokens grouped by slot, in host memory. O(tokens).

    Args:
        slots: slot of each token. -1: the token has no adapter.
    """
    present = np.flatnonzero(slots >= 0)
    order = present[np.argsort(slots[present], kind="stable")].astype(np.int32)
    counts = np.bincount(slots[present], minlength=num_slots)
    ends = np.cumsum(counts)
    tiles = [
        (slot, first, min(first + TILE_ROWS, end))
        for slot, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        for first in range(end - count, end, TILE_ROWS)
    ]
    return TokensBySlot(torch.from_numpy(order), torch.tensor(tiles, dtype=torch.int32).view(-1, 3))


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Return the maximum number of tiles of a step. The last tile of each slot may be partial."""
    return num_tokens // TILE_ROWS + min(num_tokens, num_slots)


_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of one step.

    Attributes:
        tokens: tokens of the step, in host memory. None: no token has an adapter.
        fills: slots to fill before the step.
    """

    tokens: TokensBySlot | None = None
    fills: Sequence[tuple[int, LoraAdapter]] = ()

    def columns(self) -> list[HostColumn]:
        if self.tokens is None:
            return []
        return [self.tokens.order.numpy(), self.tokens.tiles.numpy()]

    def fill(self, bank: AdapterBank) -> None:
        """Fill the slots of a bank. On the forward stream."""
        for slot, adapter in self.fills:
            bank.fill(slot, adapter)

    def adapted(self, bank: AdapterBank, sent: Sequence[Tensor]) -> AdapterStep | None:
        """Return the adapters of the step as the forward uses them. None if no token has one.

        Args:
            sent: `columns()`, on the device.
        """
        if self.tokens is None:
            return None
        return bank.adapted(TokensBySlot(*sent))


class AdapterManager:
    """The adapters of an engine's requests. Engine thread only.

    Attributes:
        bank: device memory of the slots.
        num_changes: total number of requests that returned their slot.
        num_fills: total number of adapters copied into a slot.
    """

    def __init__(self, library: AdapterCache, bank: AdapterBank, table: SlotTable) -> None:
        self.library = library
        self.bank = bank
        self._slots = AdapterSlots(bank.num_slots)
        self._held: dict[int, LoraAdapter] = {}  # by request key
        self._with_slot: set[int] = set()  # keys
        self._fills: list[tuple[int, LoraAdapter]] = []
        self._column = np.full(table.num_slots, _NONE, np.int32)  # by the request's slot
        # The newest step's adapter of each token, and its tokens by slot. Most steps are like the
        # previous one.
        self._grouped: tuple[bytes, TokensBySlot | None] = b"", None
        self.num_changes = 0
        self.num_fills = 0
        if bank.num_slots:
            table.add_listener(self._acquired)

    @property
    def num_slots_used(self) -> int:
        return self._slots.num_used

    def hold(self, request: Request) -> None:
        """Hold the request's adapter until `release`.

        Raises:
            AdapterNotLoaded: the adapter is not loaded.
        """
        if request.spec.adapter:
            self._held[request.key] = self.library.hold(request.spec.adapter)

    def take_slot(self, request: Request) -> bool:
        """Assign a device slot to a request that holds its adapter. Return False if all slots are
        in use by other adapters."""
        if not request.spec.adapter or request.key in self._with_slot:
            return True
        taken = self._slots.take(request.spec.adapter)
        if taken is None:
            return False
        slot, fresh = taken
        self._with_slot.add(request.key)
        if fresh:
            self._fills.append((slot, self._held[request.key]))
            self.num_fills += 1
        return True

    def release(self, key: int) -> None:
        """Release the adapter of a request that has ended. Does nothing if it holds none."""
        adapter = self._held.pop(key, None)
        if adapter is None:
            return
        if key in self._with_slot:
            self._with_slot.remove(key)
            self._slots.drop(adapter.id)
            self.num_changes += 1
        self.library.drop(adapter.id)

    def build(self, batch: ScheduleBatch) -> AdapterBatch | None:
        """Return the adapters of a step when it is launched. None: no row has an adapter."""
        if not self._held:
            return None
        fills, self._fills = self._fills, []
        slots = self._column[batch.slots.astype(np.intp)]
        if np.maximum.reduce(slots, initial=_NONE) == _NONE:
            return AdapterBatch(fills=fills) if fills else None
        if batch.mode is not ForwardMode.DECODE:
            slots = slots.repeat(batch.ends - batch.starts)
        if (of_tokens := slots.tobytes()) != self._grouped[0]:
            self._grouped = of_tokens, tokens_by_slot(slots, self.bank.num_slots)
        return AdapterBatch(self._grouped[1], fills)

    def rehearsal(self, num_tokens: int) -> AdapterBatch | None:
        """Return work for warmup in which all tokens have an adapter, which needs the most memory.
        None: there are no slots for adapters."""
        num_slots = self.bank.num_slots
        if not num_slots:
            return None
        tokens = tokens_by_slot(np.arange(num_tokens) % num_slots, num_slots)
        return AdapterBatch(tokens)

    def _acquired(self, slot: int, request: Request) -> None:
        has = request.spec.adapter != NO_ADAPTER
        self._column[slot] = self._slots.slot_of(request.spec.adapter) if has else _NONE


def no_adapters(table: SlotTable) -> AdapterManager:
    bank = AdapterBank((), 0, 1, torch.device("cpu"), torch.float32)
    return AdapterManager(AdapterCache(0, 0), bank, table)


def bank_of(config: LoraConfig, model: Model, free: int) -> AdapterBank:
    """Return the adapter bank of a model.

    Args:
        free: bytes of device memory that it may use.
    Raises:
        ConfigError: it needs more memory, or the model supports no adapters.
    """
    num_slots = 0 if config.adapter_dir is None else config.max_loras
    if num_slots and not model.products:
        raise ConfigError(
            "engine.lora.adapter_dir: adapters need a native model implementation, and this "
            "model runs on the Transformers library"
        )

    def bank_on(device: torch.device) -> AdapterBank:
        return AdapterBank(model.products, num_slots, config.max_rank, device, model.dtype)

    needed = bank_on(torch.device("meta")).num_bytes
    if needed > free:
        raise ConfigError(
            f"engine.lora.max_loras: {num_slots} slots of rank {config.max_rank} take "
            f"{needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB may be used"
        )
    return bank_on(model.device)


def adapter_directory(config: LoraConfig, model: Model) -> AdapterDirectory:
    reader = AdapterReader(
        products=model.products,
        limits=AdapterLimits(config.max_rank, config.max_cpu_lora_bytes),
        dtype=model.dtype,
        pinned=model.device.type == "cuda",
        elsewhere=model.elsewhere,
    )
    return AdapterDirectory(config.adapter_dir, reader)


def load_all(config: LoraConfig, source: AdapterSource, library: AdapterCache) -> None:
    """Load the configured adapters at start.

    Raises:
        ConfigError: an adapter is invalid, or there are too many.
    """
    for each in config.preload:
        name, _, path = each.partition("=")
        try:
            library.add(name, source.read(path or name))
        except ServingError as error:
            raise ConfigError(f"engine.lora.preload: {name}: {error}") from error
    if len(library.names()) < len(config.preload):
        raise ConfigError("engine.lora.preload: more than max_cpu_loras or max_cpu_lora_bytes")

"""The adapters of one engine: loaded, held by requests, in slots of the device, and in steps.

    asked for --hold--> has it in host memory --take_slot--> may be computed --release--> gone

A request holds its adapter, and later a slot, from the moment it is let in until its end: nothing
that happens to the adapter meanwhile concerns it. A slot is filled on the forward stream before the
step that needs it, and so after all steps that had another adapter there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.requests.adapter import NO_ADAPTER
from engine.adapters.bank import AdaptedStep, AdapterBank
from engine.adapters.grouping import tokens_by_slot
from engine.adapters.library import Library
from engine.adapters.slots import DeviceSlots
from engine.adapters.stored import Adapter
from engine.batch.batch import ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import RequestTable
from kernels.adapters.low_rank import TokensBySlot

_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWork:
    """What a step needs of adapters.

    Attributes:
        tokens: of the step, in host memory; None: it has none with an adapter.
        fills: slots to be filled before it.
    """

    bank: AdapterBank
    tokens: TokensBySlot | None = None
    fills: Sequence[tuple[int, Adapter]] = ()

    def tensors(self) -> list[Tensor]:
        """In host memory, contiguous."""
        return [] if self.tokens is None else [self.tokens.order, self.tokens.tiles]

    def fill(self) -> None:
        """On the forward stream."""
        for slot, adapter in self.fills:
            self.bank.fill(slot, adapter)

    def adapted(self, sent: Sequence[Tensor]) -> AdaptedStep | None:
        """
        Args:
            sent: `tensors()`, on the device.
        """
        if self.tokens is None:
            return None
        order, tiles = sent
        return self.bank.adapted(replace(self.tokens, order=order, tiles=tiles))


class Adapters:
    """Engine thread only.

    Attributes:
        nothing: what a step needs without one.
        num_changes: counts the requests that gave their slot back, ever.
        num_fills: counts adapters that were put into a slot.
    Args:
        table: of the requests that steps are made of.
    """

    def __init__(self, library: Library, bank: AdapterBank, table: RequestTable) -> None:
        self.library = library
        self._bank = bank
        self._slots = DeviceSlots(bank.num_slots)
        self._held: dict[int, Adapter] = {}  # by request key
        self._with_slot: set[int] = set()  # keys
        self._fills: list[tuple[int, Adapter]] = []
        self._column = np.full(table.num_slots, _NONE, np.int32)  # by the request's slot
        self.nothing = AdapterWork(bank)
        self.num_changes = 0
        self.num_fills = 0
        if bank.num_slots:
            table.tell_of_requests(self._acquired)

    @property
    def num_slots_used(self) -> int:
        return self._slots.num_used

    def hold(self, request: Request) -> None:
        """The request is here from now on; `release` follows.

        Raises:
            AdapterNotLoaded: its adapter is not.
        """
        if request.spec.adapter:
            self._held[request.key] = self.library.hold(request.spec.adapter)

    def take_slot(self, request: Request) -> bool:
        """Of one that is held. False: it has to wait until another adapter's last request has
        ended."""
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
        """The request has ended. Harmless where it holds nothing."""
        adapter = self._held.pop(key, None)
        if adapter is None:
            return
        if key in self._with_slot:
            self._with_slot.remove(key)
            self._slots.drop(adapter.id)
            self.num_changes += 1
        self.library.drop(adapter.id)

    def build(self, batch: ScheduleBatch) -> AdapterWork:
        """At the launch of a step. Where nobody has an adapter it costs nothing."""
        if not self._held:
            return self.nothing
        fills, self._fills = self._fills, []
        slots = self._column[batch.slots]
        if slots.max(initial=_NONE) == _NONE:
            return AdapterWork(self._bank, fills=fills) if fills else self.nothing
        of_tokens = np.repeat(slots, batch.ends - batch.starts)
        return AdapterWork(self._bank, tokens_by_slot(of_tokens, self._bank.num_slots), fills)

    def rehearsal(self, num_tokens: int) -> AdapterWork:
        """Of so many tokens, all with an adapter: as much memory as any step needs."""
        num_slots = self._bank.num_slots
        if not num_slots:
            return self.nothing
        tokens = tokens_by_slot(np.arange(num_tokens) % num_slots, num_slots)
        return AdapterWork(self._bank, tokens)

    def _acquired(self, slot: int, request: Request) -> None:
        has = request.spec.adapter != NO_ADAPTER
        self._column[slot] = self._slots.slot_of(request.spec.adapter) if has else _NONE


def no_adapters(table: RequestTable) -> Adapters:
    """For requests that ask for none."""
    bank = AdapterBank((), 0, 1, torch.device("cpu"), torch.float32)
    return Adapters(Library(0, 0), bank, table)

"""The experts of a layer in slots, where experts may have replicas and may be replaced (EPLB)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.blocks.source import BlockWeights
from engine.models.linear import SlottedExperts
from engine.models.quantized.experts import ExpertShape
from engine.models.refill import refill
from engine.ranks import ExpertPart
from engine.ranks.expert_placement import ExpertPlacement, LayerSlots, slot_table


@dataclass(frozen=True, slots=True, eq=False)
class PlacedExperts:
    """The experts in the slots of one rank.

    Every pair of token and expert is computed by one of the ranks that have the expert. The sum
    over the ranks adds the results.

    Attributes:
        layer: prefix of the layer's names in the checkpoint.
        table: int32 [ranks, experts], see `slot_table`. Changed in place, because graphs may
            contain its address.
        counts: int64 [experts], tokens of each expert since the counts were last read. Includes the
            padding of graphs, because it is computed. None: nothing reads them.
    """

    layer: str
    shape: ExpertShape
    net: SlottedExperts
    num_slots: int
    table: Tensor
    counts: Tensor | None

    @classmethod
    def of(
        cls, source: BlockWeights, shape: ExpertShape, placement: ExpertPlacement
    ) -> "PlacedExperts":
        layer, rank, device = source.prefix, source.share.rank, source.device
        slots = placement.slots(layer, shape.count)
        counts = None
        if placement.counts_tokens and rank == 0:  # all ranks would count the same tokens
            counts = torch.zeros(shape.count, dtype=torch.int64, device=device)
        return cls(
            layer,
            shape,
            source.experts(shape, ExpertPart(slots[rank], range(shape.inner))),
            len(slots[rank]),
            torch.tensor(slot_table(slots, rank, shape.count), dtype=torch.int32, device=device),
            counts,
        )

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        num_ranks, count = self.table.shape
        if self.counts is not None:  # bincount would wait for the device
            flat = ids.flatten().long()
            self.counts.scatter_add_(0, flat, torch.ones_like(flat))
        rows = torch.arange(len(ids), device=ids.device).remainder_(num_ranks).mul_(count)
        slots = self.table.flatten()[rows.unsqueeze(1) + ids]
        # The number of slots marks pairs of another rank, see grouped_mlp.
        return self.net.apply(x, weights * (slots < self.num_slots), slots)

    def replace(self, source: BlockWeights, before: LayerSlots, after: LayerSlots) -> None:
        """Read the experts that are new to this rank, and use the new slots. No forward may run
        meanwhile.

        Args:
            source: weights of the whole model.
        """
        rank = source.share.rank
        slots = [slot for slot, old in enumerate(before[rank]) if old != after[rank][slot]]
        if slots:
            part = ExpertPart([after[rank][slot] for slot in slots], range(self.shape.inner))
            fresh = source.within(self.layer).experts(self.shape, part)
            for place, slot in enumerate(slots):
                refill(self.net.slot(slot), fresh.slot(place))
        table = slot_table(after, rank, self.shape.count)
        with torch.inference_mode():
            self.table.copy_(torch.tensor(table, dtype=torch.int32))

"""Expert placement: the experts of each rank. Busy experts have replicas on several ranks (EPLB).

Every layer has the same number of slots on each rank. A slot has one expert. The index of a token
in its step selects the replica, so that each replica computes a part of the tokens.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

from common.config import ParallelConfig
from common.errors import ConfigError

LayerSlots: TypeAlias = tuple[tuple[int, ...], ...]  # by rank: the expert in each slot

_LEAST_GAIN = 0.05  # minimum reduction of the largest load for which experts move, as a share of it


class ExpertPlacement:
    """The experts in the slots of all ranks, by layer. It is equal on all ranks, and changes only
    while no step is computed.

    Args:
        size: number of ranks.
        num_redundant: slots of a layer in addition to its experts.
    Attributes:
        counts_tokens: whether rank 0 counts the tokens of each expert.
    """

    def __init__(self, size: int, num_redundant: int, *, counts_tokens: bool) -> None:
        self.counts_tokens = counts_tokens
        self._size = size
        self._num_redundant = num_redundant
        self._layers: dict[str, LayerSlots] = {}

    @classmethod
    def of(cls, config: ParallelConfig) -> "ExpertPlacement | None":
        """Return the placement at start. None: experts have no replicas and never move."""
        if not config.redundant_experts and not config.rebalance_steps:
            return None
        counts_tokens = config.rebalance_steps > 0
        return cls(config.tp, config.redundant_experts, counts_tokens=counts_tokens)

    def slots(self, layer: str, count: int) -> LayerSlots:
        """Return the slots of a layer with `count` experts.

        Args:
            layer: prefix of the layer's names in the checkpoint.
        Raises:
            ConfigError: the ranks cannot have equal numbers of slots with different experts.
        """
        if layer not in self._layers:
            self._layers[layer] = self._first_slots(count)
        return self._layers[layer]

    def move(self, moves: Mapping[str, LayerSlots]) -> None:
        """Record the new slots of some layers."""
        self._layers.update(moves)

    def _first_slots(self, count: int) -> LayerSlots:
        """Assign consecutive experts to each rank. The first experts get the replicas."""
        size, total = self._size, count + self._num_redundant
        if total % size:
            raise ConfigError(
                f"engine.parallel.redundant_experts: {count} experts and {self._num_redundant} "
                f"replicas cannot have equal numbers of slots on {size} ranks"
            )
        if total > size * count:
            raise ConfigError(
                f"engine.parallel.redundant_experts: {size} ranks cannot have more than "
                f"{(size - 1) * count} replicas of {count} experts"
            )
        own = total // size
        return tuple(
            tuple(slot % count for slot in range(rank * own, (rank + 1) * own))
            for rank in range(size)
        )


def slot_table(slots: LayerSlots, rank: int, count: int) -> list[list[int]]:
    """Return the slot of each expert on a rank, by token index modulo the number of ranks. If
    another rank computes the expert for such tokens, the value is the number of slots."""
    places = {expert: slot for slot, expert in enumerate(slots[rank])}
    none, owners = len(places), _owners(slots, count)
    return [
        [
            places[expert] if _owner(owners[expert], expert, row) == rank else none
            for expert in range(count)
        ]
        for row in range(len(slots))
    ]


def rank_loads(counts: Sequence[int], slots: LayerSlots) -> list[float]:
    """Return the number of tokens that each rank computes, given the tokens of each expert of a
    layer."""
    loads = [0.0] * len(slots)
    for expert, owners in enumerate(_owners(slots, len(counts))):
        rows = range(len(slots)) if len(owners) > 1 else (0,)
        for row in rows:
            loads[_owner(owners, expert, row)] += counts[expert] / len(rows)
    return loads


def imbalance(counts: Sequence[Sequence[int]], layers: Sequence[LayerSlots]) -> float:
    """Return the largest load of a rank divided by the mean load, each summed over all layers. A
    layer waits for the rank with its largest load."""
    loads = [rank_loads(*layer) for layer in zip(counts, layers, strict=True)]
    mean = sum(map(sum, loads)) / len(layers[0])
    return sum(map(max, loads)) / mean if mean else 1.0


def num_moved(before: LayerSlots, after: LayerSlots) -> int:
    """Return the number of slots that get another expert."""
    pairs = zip(before, after, strict=True)
    return sum(old != new for of_rank in pairs for old, new in zip(*of_rank, strict=True))


def balanced(counts: Sequence[int], present: LayerSlots) -> LayerSlots:
    """Return slots in which the ranks compute similar numbers of tokens. Returns the present slots
    unless others are clearly better.

    Replicas go to the experts with the most tokens per replica. Experts then go to the rank with
    the least load, the busiest first. Replicas of one expert are on different ranks.

    Args:
        counts: tokens of each expert of the layer.
    """
    num_replicas = _num_replicas(counts, len(present), sum(map(len, present)))
    shares = [count / number for count, number in zip(counts, num_replicas, strict=True)]
    after = _in_present_slots(_packed(shares, num_replicas, present), present)
    least = (1 - _LEAST_GAIN) * max(rank_loads(counts, present))
    return after if max(rank_loads(counts, after)) < least else present


def _owners(slots: LayerSlots, count: int) -> list[list[int]]:
    """Return the ranks of each expert, ascending."""
    owners: list[list[int]] = [[] for _ in range(count)]
    for rank, experts in enumerate(slots):
        for expert in experts:
            owners[expert].append(rank)
    return owners


def _owner(owners: Sequence[int], expert: int, row: int) -> int:
    # `+ expert`, because otherwise the first token of a step would always use the first replica.
    return owners[(row + expert) % len(owners)]


def _num_replicas(counts: Sequence[int], size: int, num_slots: int) -> list[int]:
    replicas = [1] * len(counts)
    busiest = [(-float(count), expert) for expert, count in enumerate(counts)]  # a heap
    heapify(busiest)
    for _ in range(num_slots - len(counts)):
        _, expert = busiest[0]
        replicas[expert] += 1
        if replicas[expert] < size:
            heapreplace(busiest, (-counts[expert] / replicas[expert], expert))
        else:
            heappop(busiest)
    return replicas


def _packed(
    shares: Sequence[float], num_replicas: Sequence[int], present: LayerSlots
) -> list[set[int]]:
    """Return the experts of each rank, with equal numbers of slots. Among equal ranks, an expert
    goes to a rank that already has it."""
    num_slots = len(present[0])
    ranks: list[set[int]] = [set() for _ in present]
    loads = [0.0] * len(present)

    def put(expert: int, rank: int, sign: int = 1) -> None:
        (ranks[rank].add if sign > 0 else ranks[rank].remove)(expert)
        loads[rank] += sign * shares[expert]

    def room_for(expert: int) -> list[int]:
        """Return the ranks that may get an expert."""
        free = [rank for rank, has in enumerate(ranks) if len(has) < num_slots]
        if usable := [rank for rank in free if expert not in ranks[rank]]:
            return usable
        # All ranks with a free slot have the expert. A full rank moves another expert to one of
        # them.
        full = min((r for r, has in enumerate(ranks) if expert not in has), key=loads.__getitem__)
        given = min(ranks[full] - ranks[free[0]], key=lambda other: (shares[other], other))
        put(given, full, -1)
        put(given, free[0])
        return [full]

    replicas = [expert for expert, number in enumerate(num_replicas) for _ in range(number)]
    for expert in sorted(replicas, key=lambda expert: -shares[expert]):
        put(
            expert,
            min(room_for(expert), key=lambda rank: (loads[rank], expert not in present[rank])),
        )
    return ranks


def _in_present_slots(ranks: Sequence[set[int]], present: LayerSlots) -> LayerSlots:
    """Assign each set of experts to the rank that has most of them. These experts keep their
    slots."""
    pairs = [(old, new) for old in range(len(present)) for new in range(len(ranks))]
    pairs.sort(key=lambda pair: -len(ranks[pair[1]].intersection(present[pair[0]])))
    given: dict[int, int] = {}
    for old, new in pairs:
        if old not in given and new not in given.values():
            given[old] = new
    return tuple(_kept_slots(ranks[given[rank]], experts) for rank, experts in enumerate(present))


def _kept_slots(wanted: set[int], present: Sequence[int]) -> tuple[int, ...]:
    added = iter(sorted(wanted.difference(present)))
    return tuple(expert if expert in wanted else next(added) for expert in present)

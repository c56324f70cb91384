"""Metrics of an engine's ranks, pages, adapters and images."""

from collections.abc import Mapping

from common.distribution import HistogramCounts
from engine.adapters.adapters import AdapterManager
from engine.batch.table import SlotTable
from engine.core import InputEncoder
from engine.loop.rebalancing import ExpertBalancer
from engine.models.vision.seeing import VisionTower
from engine.ranks.node_group import NodeGroup
from engine.ranks.processes import Followers


class RankMeter:
    """Metrics by rank, see Meter. Empty with one rank."""

    def __init__(self, followers: Followers | None) -> None:
        self._followers = followers

    def gauges(self) -> Mapping[str, float]:
        if self._followers is None:
            return {}
        states = self._followers.states()
        return {
            **{f"rank_memory/{rank}": float(each.memory_bytes) for rank, each in states.items()},
            **{f"rank_behind/{rank}": float(each.steps_behind) for rank, each in states.items()},
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}


class PageMeter:
    """Metrics of the pages of requests, see Meter. Engine thread only."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def gauges(self) -> Mapping[str, float]:
        pages = self._table.pages_by_kind().items()
        return {f"request_pages/{kind}": float(number) for kind, number in pages}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}


class GroupMeter:
    """Metrics of a node in its data-parallel group, see Meter. Empty without a group."""

    def __init__(self, group: NodeGroup | None) -> None:
        self._lockstep = None if group is None else group.lockstep

    def gauges(self) -> Mapping[str, float]:
        if (lockstep := self._lockstep) is None:
            return {}
        return {
            "total_idle_batches": float(lockstep.idle_batches),
            "total_delayed_prefills": float(lockstep.delayed_prefills),
            "total_waited/group": lockstep.waited_s,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}


class ExpertMeter:
    """Metrics of moved experts, see Meter. Empty if experts do not move."""

    def __init__(self, balancer: ExpertBalancer | None) -> None:
        self._balancer = balancer

    def gauges(self) -> Mapping[str, float]:
        if (balancer := self._balancer) is None:
            return {}
        return {
            "expert_imbalance": balancer.imbalance,
            "total_expert_moves": float(balancer.num_moved),
            "total_expert_move_seconds": balancer.seconds,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}


class AdapterMeter:
    """Metrics of adapters, see Meter. Engine thread only."""

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    def gauges(self) -> Mapping[str, float]:
        adapters, library = self._adapters, self._adapters.library
        return {
            "adapters": float(len(library)),
            "adapter_bytes": float(library.num_bytes),
            "adapter_slots": float(adapters.num_slots_used),
            "total_adapter_fills": float(adapters.num_fills),
            "total_adapters_evicted": float(library.num_evicted),
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}


class VisionMetrics:
    """Metrics of images, see Meter."""

    def __init__(self, seeing: VisionTower | None, encoder: InputEncoder | None) -> None:
        self._seeing = seeing
        self._encoder = encoder

    def gauges(self) -> Mapping[str, float]:
        if self._seeing is None or self._encoder is None:
            return {}
        counts = self._seeing.counts
        return {
            "image_bytes": float(self._seeing.num_bytes),
            "total_images/encoded": float(counts.encoded),
            "total_images/kept": float(counts.found),
            "total_image_seconds": counts.seconds,
            "images_waiting": float(self._encoder.num_waiting),
            "total_image_batches": float(self._encoder.batches),
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

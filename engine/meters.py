"""Gauges of an engine's ranks, experts, adapters and images, by internal name."""

from collections.abc import Mapping

from engine.adapters.adapters import AdapterManager
from engine.core import InputEncoder
from engine.loop.rebalancing import ExpertBalancer
from engine.models.vision.seeing import VisionTower
from engine.ranks.lockstep import Lockstep
from engine.ranks.processes import Followers


def rank_gauges(followers: Followers) -> Mapping[str, float]:
    states = followers.states()
    return {
        **{f"rank_memory/{rank}": float(each.memory_bytes) for rank, each in states.items()},
        **{f"rank_behind/{rank}": float(each.steps_behind) for rank, each in states.items()},
    }


def group_gauges(lockstep: Lockstep) -> Mapping[str, float]:
    return {
        "total_idle_batches": float(lockstep.idle_batches),
        "total_delayed_prefills": float(lockstep.delayed_prefills),
        "total_waited/group": lockstep.waited_s,
    }


def expert_gauges(balancer: ExpertBalancer) -> Mapping[str, float]:
    return {
        "expert_imbalance": balancer.imbalance,
        "total_expert_moves": float(balancer.num_moved),
        "total_expert_move_seconds": balancer.seconds,
    }


def adapter_gauges(adapters: AdapterManager) -> Mapping[str, float]:
    library = adapters.library
    return {
        "adapters": float(len(library)),
        "adapter_bytes": float(library.num_bytes),
        "adapter_slots": float(adapters.num_slots_used),
        "total_adapter_fills": float(adapters.num_fills),
        "total_adapters_evicted": float(library.num_evicted),
    }


def image_gauges(tower: VisionTower, encoder: InputEncoder) -> Mapping[str, float]:
    counts = tower.counts
    return {
        "image_bytes": float(tower.num_bytes),
        "total_images/encoded": float(counts.encoded),
        "total_images/kept": float(counts.found),
        "total_image_seconds": counts.seconds,
        "images_waiting": float(encoder.num_waiting),
        "total_image_batches": float(encoder.batches),
    }

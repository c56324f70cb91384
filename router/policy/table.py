"""Table of all policies by name."""

import random
from collections.abc import Callable

from router.policy.basic import LeastTokens, PowerOfTwo, RandomPolicy, RoundRobin
from router.policy.consistent_hash import ConsistentHash
from router.policy.contract import RoutingPolicy
from router.policy.load import NodeLoad
from router.policy.prefix_aware import PrefixAware
from router.policy.prefix_index import PrefixIndex
from router.policy.session_affinity import SessionAffinity

_POLICIES: dict[str, Callable[[NodeLoad, PrefixIndex, random.Random], RoutingPolicy]] = {
    "round_robin": lambda load, prefixes, rng: RoundRobin(),
    "random": lambda load, prefixes, rng: RandomPolicy(rng),
    "power_of_two": lambda load, prefixes, rng: PowerOfTwo(load, rng),
    "least_tokens": lambda load, prefixes, rng: LeastTokens(load),
    "prefix_aware": lambda load, prefixes, rng: PrefixAware(load, prefixes),
    "session_affinity": lambda load, prefixes, rng: SessionAffinity(load),
    "consistent_hash": lambda load, prefixes, rng: ConsistentHash(load),
}
NAMES = tuple(_POLICIES)
HEED_PREFIXES = frozenset({"prefix_aware"})  # policies that use the prefix index


def make_policy(
    name: str, load: NodeLoad, prefixes: PrefixIndex, rng: random.Random | None = None
) -> RoutingPolicy:
    """Create a policy.

    Args:
        name: one of NAMES.
        load: that the caller charges with the placements.
        prefixes: index of the nodes' caches.
        rng: source of randomness.
    """
    return _POLICIES[name](load, prefixes, rng or random.Random())

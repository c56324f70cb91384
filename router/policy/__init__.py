"""Routing policies, which choose the nodes of a request. They open no connections."""

from router.policy.load import DecodeChoice, PlacementDecision, PlacementKey, PrefillChoice
from router.policy.policies import USE_PREFIX_INDEX, RoutingPolicy, make_policy

__all__ = [
    "USE_PREFIX_INDEX",
    "DecodeChoice",
    "PlacementDecision",
    "PlacementKey",
    "PrefillChoice",
    "RoutingPolicy",
    "make_policy",
]

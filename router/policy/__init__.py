"""Routing policies: one policy per file and one table of names. Policies open no connections."""

from router.policy.load import DecodeChoice, PlacementDecision, PlacementKey, PrefillChoice
from router.policy.policies import HEED_PREFIXES, RoutingPolicy, make_policy

__all__ = [
    "HEED_PREFIXES",
    "DecodeChoice",
    "PlacementDecision",
    "PlacementKey",
    "PrefillChoice",
    "RoutingPolicy",
    "make_policy",
]

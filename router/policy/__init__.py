"""Routing policies: one policy per file and one table of names. Policies open no connections."""

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey, PrefillChoice
from router.policy.contract import RoutingPolicy
from router.policy.table import HEED_PREFIXES, make_policy

__all__ = [
    "HEED_PREFIXES",
    "DecodeChoice",
    "PlacementDecision",
    "PlacementKey",
    "PrefillChoice",
    "RoutingPolicy",
    "make_policy",
]

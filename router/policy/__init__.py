"""Routing policies: one policy per file and one table of names. Policies open no connections."""

from router.policy.choices import DecodeChoice, Placement, PlacementKey, PrefillChoice
from router.policy.contract import Policy
from router.policy.table import HEED_PREFIXES, make_policy

__all__ = [
    "HEED_PREFIXES",
    "DecodeChoice",
    "Placement",
    "PlacementKey",
    "Policy",
    "PrefillChoice",
    "make_policy",
]

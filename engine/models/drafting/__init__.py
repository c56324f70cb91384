"""Drafters on the device: draft layers, which predict tokens from hidden states, and draft
models."""

from engine.models.drafting.block import BodySpec, DraftSpec, Eagle3Spec, InnerNorms
from engine.models.drafting.drawing import (
    EagerDrafts,
    drawn,
    has_draft,
    live_token,
    one_token,
    sample_places,
    view_of,
)
from engine.models.drafting.head import DraftHead
from engine.models.drafting.protocol import (
    DeviceDrafter,
    DraftLayer,
    DraftSteps,
    ModelVectors,
)

__all__ = [
    "BodySpec",
    "DeviceDrafter",
    "DraftHead",
    "DraftLayer",
    "DraftSpec",
    "DraftSteps",
    "EagerDrafts",
    "Eagle3Spec",
    "InnerNorms",
    "ModelVectors",
    "drawn",
    "has_draft",
    "live_token",
    "one_token",
    "sample_places",
    "view_of",
]

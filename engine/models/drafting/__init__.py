"""Layers that guess tokens ahead of a model, from its own hidden vectors: what they are made of,
and how they are run over its pages."""

from engine.models.drafting.block import DraftSpec, InnerNorms
from engine.models.drafting.body import BodySpec
from engine.models.drafting.eagle3 import Eagle3Spec
from engine.models.drafting.head import DraftHead
from engine.models.drafting.protocol import DraftLayer, DraftLayerSpec

__all__ = [
    "BodySpec",
    "DraftHead",
    "DraftLayer",
    "DraftLayerSpec",
    "DraftSpec",
    "Eagle3Spec",
    "InnerNorms",
]

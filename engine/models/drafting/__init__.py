"""Draft layers, which predict further tokens from a model's hidden states: their parts, and how
they run over the model's pages."""

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

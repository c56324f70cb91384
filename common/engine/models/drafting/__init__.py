"""Layers that guess tokens ahead of a model, from its own hidden vectors: what they are made of,
and how they are run over its pages."""

from common.engine.models.drafting.block import DraftBlock, DraftSpec
from common.engine.models.drafting.head import DraftHead

__all__ = ["DraftBlock", "DraftHead", "DraftSpec"]

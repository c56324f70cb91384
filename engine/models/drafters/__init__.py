"""Drafters with a checkpoint of their own: EAGLE heads and draft models."""

from engine.models.drafters.draft_model import DraftModelCheckpoint
from engine.models.drafters.eagle import DRAFT_FLAG, EagleCheckpoint

__all__ = ["DRAFT_FLAG", "DraftModelCheckpoint", "EagleCheckpoint"]

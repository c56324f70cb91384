"""Drafters with their own checkpoint: EAGLE heads and draft models."""

from engine.models.draft_checkpoints.draft_model import DraftModelCheckpoint
from engine.models.draft_checkpoints.eagle import DRAFT_FLAG, EagleCheckpoint

__all__ = ["DRAFT_FLAG", "DraftModelCheckpoint", "EagleCheckpoint"]

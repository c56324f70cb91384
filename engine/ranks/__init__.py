"""The ranks of a node, each with a part of the model, and the collectives between them."""

from engine.ranks.group import Group
from engine.ranks.share import WHOLE, ExpertPart, Share, Stage, stage_layers

__all__ = ["WHOLE", "ExpertPart", "Group", "Share", "Stage", "stage_layers"]

"""The ranks of a node, each with its part of the model, and the collectives between them."""

from engine.ranks.group import Group
from engine.ranks.share import WHOLE, ExpertPart, RankGroups, Share, Stage, stage_layers

__all__ = ["WHOLE", "ExpertPart", "Group", "RankGroups", "Share", "Stage", "stage_layers"]

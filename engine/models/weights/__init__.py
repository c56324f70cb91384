"""Sources of weights for a decoder's blocks: a checkpoint, or a survey that only counts bytes."""

from engine.models.weights.reader import (
    load_weights,
    move_experts,
    placed_experts,
    refill_weights,
)
from engine.models.weights.survey import stored_tensors, weight_bytes

__all__ = [
    "load_weights",
    "move_experts",
    "placed_experts",
    "refill_weights",
    "stored_tensors",
    "weight_bytes",
]

"""Sources of weights for a decoder's blocks: a checkpoint, or a survey that only counts bytes."""

from engine.models.weights.stored import StoredDecoder, placed_experts

__all__ = ["StoredDecoder", "placed_experts"]

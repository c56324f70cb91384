"""Where a decoder's blocks get weights: from a checkpoint, or from a count of what they take."""

from engine.models.weights.reader import load_weights, refill_weights
from engine.models.weights.survey import stored_tensors, weight_bytes

__all__ = ["load_weights", "refill_weights", "stored_tensors", "weight_bytes"]

"""Sampling, and the row features that change logits or outputs of single requests."""

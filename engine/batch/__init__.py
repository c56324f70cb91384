"""Inputs of a step: requests, the table of their rows, the batch and its tensors."""

"""Inputs of a step: requests, the slot table, the batch and its tensors."""

"""Mixture of experts: routing of tokens, and the grouped products."""

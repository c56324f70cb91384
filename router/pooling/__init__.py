"""Vectors and scores of texts."""

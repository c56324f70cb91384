"""Sharing of cached prefixes and weights between nodes: a node's exports, and its reads."""

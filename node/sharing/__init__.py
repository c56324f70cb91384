"""Sharing of cached prefixes and weights between nodes: both the exports of a node and
its reads.
"""

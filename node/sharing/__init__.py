"""Sharing between nodes besides the KV of requests: cached prefixes and weights. Both the exports
of a node and its reads.
"""

"""Prefixes that one node has cached and another one reads: what any node lends, and fetches."""

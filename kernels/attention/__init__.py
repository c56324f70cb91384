"""Attention over paged keys and values, planned once per forward and launched once per layer."""

"""Attention over keys and values in pages: planned once a forward, launched once a layer."""

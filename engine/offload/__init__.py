"""Offload tiers below the prefix cache: they keep evicted pages, which can be loaded back."""

"""The offload tiers below the prefix cache: evicted pages are kept there and loaded back."""

"""The tcp data path, which works between any two hosts, over Baton's own socket protocol."""

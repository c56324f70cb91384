"""Backends that move pages from a producer's memory into a consumer's. base.py has the contract."""

"""Backends that copy pages from a producer's pool into a consumer's. base.py has the interface."""

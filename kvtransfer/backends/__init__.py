"""Backends that move pages from an owner's memory into a reader's. base.py has the contract."""

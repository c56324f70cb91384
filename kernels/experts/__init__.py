"""Layers of experts: who goes where, and the products of those who went."""

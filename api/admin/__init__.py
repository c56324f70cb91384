"""Operator endpoints: nodes, running requests, plans, adapters and engine commands."""

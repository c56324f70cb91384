"""Operators' commands for running routers and nodes: calls, drains, restarts, lists."""

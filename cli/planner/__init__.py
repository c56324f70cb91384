"""Planner for the number of nodes of each role, based on the figures that nodes report."""

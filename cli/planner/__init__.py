"""Autoscaling planner: recommends nodes of each role by the load that nodes report."""

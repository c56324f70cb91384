"""Capacity planning: the layout of GPUs that serves the highest rate within latency limits.

`make_plan` predicts every layout by closed forms, without simulating steps.
"""

from simulation.plan.layouts import Layout
from simulation.plan.search import Candidate, Hardware, Plan, make_plan
from simulation.plan.traffic import LatencyTargets, Traffic

__all__ = ["Candidate", "Hardware", "LatencyTargets", "Layout", "Plan", "Traffic", "make_plan"]

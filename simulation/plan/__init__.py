"""Capacity planning: which layout of GPUs serves the highest rate within limits of latency.

`make_plan` predicts every layout by closed forms. Nothing is simulated step by step.
"""

from simulation.plan.layouts import Layout
from simulation.plan.search import Candidate, Cluster, Plan, make_plan
from simulation.plan.traffic import Objectives, Traffic

__all__ = ["Candidate", "Cluster", "Layout", "Objectives", "Plan", "Traffic", "make_plan"]

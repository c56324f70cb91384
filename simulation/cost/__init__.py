"""Cost models for simulations and plans: the duration of a step on a device.

Based on public kernel measurements, or on a file of `baton bench steps`. Needs no torch and no GPU.
"""

from simulation.cost.models import StepShape
from simulation.cost.step_cost import StepCost

__all__ = ["StepCost", "StepShape"]

"""Cost models: the duration of a step on a device, from public measurements or from a file.

Needs no torch and no GPU.
"""

from simulation.cost.step_cost import StepCost
from simulation.cost.step_shape import StepShape

__all__ = ["StepCost", "StepShape"]

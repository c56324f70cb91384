"""Cost models: the duration of a step on a device, from public measurements or from a file.

Needs no torch and no GPU.
"""

from simulation.cost.models import StepShape
from simulation.cost.step_cost import StepCost

__all__ = ["StepCost", "StepShape"]

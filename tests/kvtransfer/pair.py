"""Hand-offs of prompts as a simulation: one node reads, from one owner or from several."""

from common.config import TransferConfig
from tests.kvtransfer.node import Node
from tests.kvtransfer.sides import OwnerSide, Plan, ReaderSide
from tests.kvtransfer.world import Simulation


class PairSimulation(Simulation):
    def __init__(self, plan: Plan, config: TransferConfig) -> None:
        reader = Node(101, reader=ReaderSide(plan, config, 101))
        instances = [100 * n + 101 for n in range(1, plan.owners + 1)]
        owners = [Node(each, owner=OwnerSide(plan, config, each)) for each in instances]
        dials = [(0, n) for n in range(1, plan.owners + 1)]
        super().__init__([reader, *owners], dials, plan.only_faults)

"""Search of all reachable states of a simulation, with a limited number of faults."""

from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet

from common.config import TransferConfig
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import (
    Broken,
    Plan,
    SimulatedConsumer,
    SimulatedProducer,
    require,
)
from tests.kvtransfer.search.world import Simulation, Step

PATIENT = TransferConfig(heartbeat_s=1e6, max_missed_heartbeats=1)  # deadlines pass, streams live
# the deadline for messages of a peer
SILENT = TransferConfig(heartbeat_s=1.0, max_missed_heartbeats=1)


@dataclass(frozen=True)
class Searched:
    states: int
    ends: int  # of them, states in which only a fault can happen
    node_states: tuple[int, ...]


def search(plan: Plan, config: TransferConfig, *, faults: int) -> Searched:
    """Visit every state that this number of faults can lead to, and check I1-I5 in each.

    Raises:
        Broken: with the steps that lead to it. An error of the product's own counts, too.
    """
    return search_in(PairSimulation(plan, config), faults=faults)


def search_in(simulation: Simulation, *, faults: int) -> Searched:
    """Search a simulation with its own invariants."""
    start = simulation.start(faults)
    # States are remembered only by their hash. Among two million, two collide with a probability of
    # one in a million.
    came_from: dict[int, tuple[int, Step]] = {hash(start): (0, ())}
    pending = [start]
    ends = 0
    while pending:
        world = pending.pop()
        here = hash(world)
        step: Step = ()
        try:
            steps = simulation.steps(world)
            if not steps:
                ends += 1
                # Not even a deadline is needed: every end is reported, or its stream ends.
                require(simulation.rests(world), "I3: something waits for ever")
            afters = [(step := s, simulation.after(world, s)) for s in steps]
            more = simulation.faults(world)
            afters += [(step := f, simulation.after_fault(world, f)) for f in more]
        except Exception as fault:
            path = "\n".join([*_path(came_from, here), f"then {step}"])
            raise Broken(f"{type(fault).__name__}: {fault}\nafter\n{path}") from fault
        for step, after in afters:
            there = hash(after)
            if there not in came_from:
                came_from[there] = (here, step)
                pending.append(after)
    return Searched(len(came_from), ends, tuple(len(each.nodes) for each in simulation.states))


def _path(came_from: dict[int, tuple[int, Step]], here: int) -> list[str]:
    labels: list[str] = []
    while here in came_from and came_from[here][1]:
        here, label = came_from[here]
        labels.append(str(label))
    return labels[::-1]


class PairSimulation(Simulation):
    """Hand-offs of prompts: one node reads from one or several producers."""

    def __init__(self, plan: Plan, config: TransferConfig) -> None:
        consumer = Node(101, consumer=SimulatedConsumer(plan, config, 101))
        instances = [100 * n + 101 for n in range(1, plan.producers + 1)]
        producers = [
            Node(each, producer=SimulatedProducer(plan, config, each)) for each in instances
        ]
        dials = [(0, n) for n in range(1, plan.producers + 1)]
        super().__init__([consumer, *producers], dials, plan.only_faults)


def case(
    id: str,
    plan: object,
    config: TransferConfig,
    faults: int,
    states: int,
    *,
    long: bool = False,
    nightly: bool = False,
) -> ParameterSet:
    """Return a search as a parameter of a test.

    Args:
        states: a number of states. The search must visit more.
        long: whether it takes minutes.
        nightly: whether it takes even longer.
    """
    marks = [pytest.mark.long, pytest.mark.timeout(900)] if long or nightly else []
    marks += [pytest.mark.nightly] if nightly else []
    return pytest.param(plan, config, faults, states, id=id, marks=marks)

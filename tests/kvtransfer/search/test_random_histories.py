"""Long random histories of hand-offs over one pair, four at a time, with heartbeats, tiny pools,
an engine that handles its events late, and many faults. I1-I5 of docs/design/hand-off.md hold,
and at the end the system comes to rest."""

import random

import pytest

from common.config import TransferConfig
from tests.kvtransfer.search.search import PairSimulation
from tests.kvtransfer.search.sides.hand_off import Plan, require
from tests.kvtransfer.search.world import Simulation, World

NUM_STEPS = 600
FAULTS = 40
TIME = ("tick",)


def _plan(rng: random.Random) -> Plan:
    prompts = tuple(rng.choice((3, 4, 7, 11)) for _ in range(4))
    prefixes = tuple(rng.choice((0, 0, tokens // 4 * 4, tokens)) for tokens in prompts)
    return Plan(
        prompts,
        prefixes,
        consumer_pages=rng.choice((0, 4, 5)),
        producer_pages=rng.choice((0, 4, 5)),
        attempts=3,
        budget_s=rng.choice((8.0, 600.0)),
        admits=rng.random() < 0.5,
        asynchronous=rng.random() < 0.5,
        beats=rng.random() < 0.7,
    )


def _walk(simulation: Simulation, rng: random.Random, world: World) -> World:
    """Take many random steps, some of them faults."""
    for _ in range(NUM_STEPS):
        steps = simulation.steps(world) + simulation.again(world)
        faults = simulation.faults(world)
        if faults and (not steps or rng.random() < 0.08):
            fault = rng.choice(faults)
            # Time passes often, but rarely makes a deadline expire.
            world = (simulation.after if TIME[0] in fault else simulation.after_fault)(world, fault)
        elif steps:
            world = simulation.after(world, rng.choice(steps))
    return world


def _settle(simulation: Simulation, rng: random.Random, world: World) -> World:
    """Continue without faults and without the passing of time."""
    steps = simulation.steps(world)
    while steps:
        world = simulation.after(world, rng.choice(steps))
        steps = simulation.steps(world)
    return world


# Seen failing, at some seed, without each line of the list in test_hand_off_search.py except those
# of rules 5 and 11, which the passing of time repairs.
@pytest.mark.parametrize(
    "first_seed",
    [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (10, 20, 30, 40))],
)
def test_no_long_history_breaks_an_invariant(first_seed):
    for seed in range(first_seed, first_seed + 10):
        rng = random.Random(seed)
        simulation = PairSimulation(
            _plan(rng), TransferConfig(heartbeat_s=1.0, max_missed_heartbeats=3)
        )
        world = _walk(simulation, rng, simulation.start(FAULTS))
        world = _settle(simulation, rng, world)
        require(simulation.rests(world), f"I3: something waits for ever, seed {seed}")

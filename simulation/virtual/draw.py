"""Scenarios drawn by a seed: clusters, loads, faults and operators' commands.

Most draws are near a limit, because defects show there: pools with room for few requests, few
slots, small chunks, slow networks, and clients that leave.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from common.config.router import Policy
from simulation.virtual.faults import (
    ROUTER,
    Cut,
    Fault,
    Freeze,
    HalfOpen,
    Kill,
    SlowDevice,
    SlowLink,
)
from simulation.virtual.operations import (
    Drain,
    Migrate,
    Operation,
    Pause,
    PauseMode,
    Role,
    SetRole,
)
from simulation.virtual.scenario import (
    ClusterSpec,
    LoadSpec,
    NetworkPath,
    PlannerSpec,
    Scenario,
)

_TIMEOUT_S = 120.0  # of a request. No drawn load comes near it
_INPUTS = ((1, 100), (20, 900), (500, 3000))
_OUTPUTS = ((1, 8), (5, 60), (30, 150))
_POLICIES = tuple(name for name in get_args(Policy) if name != "session_affinity")
_STANDARD = None  # leave the default
# Values of options of all nodes.
_OPTIONS: dict[str, Sequence[Any]] = {
    "engine.scheduler.max_running_requests": (_STANDARD, _STANDARD, 2, 4, 8),
    "engine.scheduler.chunked_prefill_tokens": (_STANDARD, _STANDARD, 64, 256, 512),
    "engine.scheduler.retract_every": (_STANDARD, _STANDARD, 5, 30),
    "engine.scheduler.overlap_schedule": (_STANDARD, _STANDARD, _STANDARD, False),
    "engine.cache.swap_pages": (_STANDARD, _STANDARD, _STANDARD, 0, 20),
    "engine.cache.prefix_cache": (_STANDARD, _STANDARD, _STANDARD, _STANDARD, False),
}


def drawn(seed: int) -> Scenario:
    """Return the scenario of a seed. Node 0 of each kind is never killed, and keeps its role unless
    a planner changes it."""
    rng = random.Random(f"chaos/{seed}")
    prompt, response = rng.choice(_INPUTS), rng.choice(_OUTPUTS)
    cluster = _cluster(rng, prompt[1] + response[1])
    requests = rng.randint(8, 30)
    load = LoadSpec(
        rate=round(rng.choice((3.0, 10.0, 40.0)) * rng.uniform(0.7, 1.4), 2),
        input=prompt,
        output=response,
        prefixes=rng.choice((0, 0, 1, 3)),
        requests=requests,
        timeout=_TIMEOUT_S,
        cancels=rng.choice((0.0, 0.0, 0.1, 0.4)),
        stops=rng.choice((0.0, 0.3, 1.0)),
    )
    scenario = Scenario(cluster, load, rng.choice(_POLICIES), seed=seed)
    seconds = requests / (load.rate or 1.0)
    planner = PlannerSpec(every_s=0.5, sustained_s=1.0, settle_s=1.0)
    planned = not cluster.colocated and rng.random() < 0.1
    mortal = [] if planned else [name for name in scenario.nodes if not name.endswith("/0")]
    faults = [_fault(rng, scenario.nodes, mortal, seconds) for _ in range(rng.randint(0, 4))]
    operations = [
        _operation(rng, scenario.nodes, mortal, seconds) for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    return replace(
        scenario,
        faults=tuple(sorted(faults, key=lambda each: each.at)),
        operations=tuple(sorted(operations, key=lambda each: each.at)),
        planner=planner if planned else None,
    )


def _cluster(rng: random.Random, longest_tokens: int) -> ClusterSpec:
    """Draw a cluster for requests of at most so many tokens."""
    page_size = rng.choice((16, 16, 32))
    room = rng.choice((None, None, 1.3, 3.0))  # for so many of the longest requests
    chosen = {name: rng.choice(values) for name, values in _OPTIONS.items()}
    options = {name: value for name, value in chosen.items() if value is not _STANDARD}
    if page_size != 16:
        options["engine.cache.page_size"] = page_size
    if room is not None:
        options["engine.cache.num_pages"] = int(-(-longest_tokens // page_size) * room) + 2
    path: NetworkPath = rng.choice(get_args(NetworkPath))
    cluster = ClusterSpec("h100", "llama-3-8b", path=path, options=options)
    if rng.random() < 0.15:
        return replace(cluster, colocated=rng.randint(2, 3))
    return replace(cluster, prefill=rng.randint(1, 3), decode=rng.randint(1, 3))


def _fault(rng: random.Random, nodes: Sequence[str], mortal: Sequence[str], load_s: float) -> Fault:
    at = round(rng.uniform(0.0, load_s), 3)
    seconds = round(10 ** rng.uniform(-2.0, 1.3), 3)
    factor = round(10 ** rng.uniform(0.3, 1.5), 1)
    restart_s = rng.choice((None, seconds))
    node = rng.choice(nodes)
    one, other = rng.sample([*nodes, ROUTER], 2)
    kinds: list[Callable[[], Fault]] = [
        lambda: Freeze(node, at, seconds),
        lambda: SlowDevice(node, factor, at, seconds),
        lambda: Cut((one, other), at, seconds),
        lambda: HalfOpen((one, other), at, seconds),
        lambda: SlowLink((one, other), factor, at, seconds),
    ]
    if mortal:
        kinds += [lambda: Kill(rng.choice(mortal), at, restart_s)] * 2
    return rng.choice(kinds)()


def _operation(
    rng: random.Random, nodes: Sequence[str], mortal: Sequence[str], load_s: float
) -> Operation:
    at = round(rng.uniform(0.0, load_s), 3)
    seconds = round(10 ** rng.uniform(-2.0, 1.0), 3)
    mode: PauseMode = rng.choice(get_args(PauseMode))
    node = rng.choice(nodes)
    decoding = [name for name in nodes if not name.startswith("prefill")]
    kinds: list[Callable[[], Operation]] = [
        lambda: Pause(node, mode, at, seconds, optional=True),
        lambda: Migrate(rng.choice(decoding), at, optional=True),
    ]
    if mortal:
        role: Role = rng.choice(get_args(Role))
        kinds.append(lambda: Drain(rng.choice(mortal), at, optional=True))
        kinds.append(lambda: SetRole(rng.choice(mortal), role, at, optional=True))
    return rng.choice(kinds)()

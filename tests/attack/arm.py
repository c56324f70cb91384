"""`python -m tests.attack.arm NAME TARGET`: one arm of the attack, in its own process.

It makes random moves, several at a time, for a limited time. It prints how often it made each kind
of move, and how many of them the other side ended. This output is not judged: the verdict on the
system comes from outside (verdict.py).
"""

import asyncio
import importlib
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TypeAlias

import grpc
import msgspec

from tests.attack.target import Target

Move: TypeAlias = Callable[[Target, Random], Awaitable[None]]


def moves_of(arm: ModuleType) -> dict[str, Move]:
    """Return the moves of an arm: its public coroutine functions."""
    return {
        name.replace("_", " "): function
        for name, function in vars(arm).items()
        if inspect.iscoroutinefunction(function)
        and function.__module__ == arm.__name__
        and not name.startswith("_")
    }


# Requests that a client with a key may send, and which must not delay other clients (bound.py).
COSTLY_ARMS = (
    *("http_bodies", "grammars", "stop_regexes", "bad_words", "one_of", "images", "stop_strings"),
    "long_answers",
)
ARMS = (
    *("http_bytes", "grpc_calls", "data_port", "other_ports", "liars", "settings"),
    *COSTLY_ARMS,
)
MOVE_S = 10.0  # longest duration of one move
_PAUSE_S = 0.02  # between two moves of a worker: an attack, not a race for the processor
# Errors with which a system can end a move. It has no other way to respond to one.
_ENDED = (OSError, EOFError, TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError)


async def attack(
    moves: Mapping[str, Move], target: Target, draw: Random, num_workers: int
) -> Counter[str]:
    """Make moves for the duration of the target."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + target.seconds

    async def work() -> None:
        while time.monotonic() < until:
            name = draw.choice(list(moves))
            counts[name] += 1
            try:
                async with asyncio.timeout(MOVE_S):
                    await moves[name](target, Random(draw.getrandbits(64)))
            except _ENDED:
                counts[f"{name}, ended"] += 1
            await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as workers:
        for _ in range(num_workers):
            workers.create_task(work())
    return counts


def main(name: str, file: str) -> None:
    os.nice(10)
    target = Target.read(Path(file))
    arm = importlib.import_module(f"tests.attack.arms.{name}")
    asyncio.run(_attack_and_leave(arm, target, target.random(name)))


async def _attack_and_leave(arm: ModuleType, target: Target, draw: Random) -> None:
    """End the process at once. An orderly exit of grpc.aio would wait for every call ever
    started."""
    counts = await attack(moves_of(arm), target, draw, arm.NUM_WORKERS)
    print(msgspec.json.encode(dict(sorted(counts.items()))).decode(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

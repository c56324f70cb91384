"""Compare the bits of random requests in random circumstances with those of the requests alone.

    python -m tools.bench.bits [--pairs 300] [--seed 1]

Each pair is a request in a system with `engine.batch_invariant`: with other requests, cached
prefixes, retraction, migration, killed nodes, drafts, threads. Its tokens and log-probabilities
must equal those of a lone, cold request on a colocated node. If they differ, circumstances are
removed one by one while the difference stays. The run fails if a pair differs, or if a kind of
event took place less than 10 times in 300 pairs.
"""

import argparse
import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import uvloop

from tools.bench.bits.circumstances import MODELS, Circumstances, ComparedKind
from tools.bench.bits.systems import EVENTS, ComparedModel, ComparedPair, Tally
from tools.bench.support import record

_ROUNDS = 6  # rounds of a system
_IN_A_ROUND = 4  # pairs of a round
_COMPLETE = 300  # from this number of pairs on, each kind of event must have occurred often enough
_OFTEN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.bits")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument(
        "--only", default="", help="only models whose name contains it, such as qwen3_moe or tp2"
    )
    parser.add_argument(
        "--first", action="store_true", help="end with the first pair that differs, without search"
    )
    options = parser.parse_args()
    kinds = [kind for kind in MODELS if options.only in kind.name]
    if not kinds:
        parser.error(f"--only {options.only}: there are {', '.join(kind.name for kind in MODELS)}")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    record.say(f"seed {seed}")
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="baton-bits-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = run(Path(directory), Random(seed), options.pairs, tally, kinds, not options.first)
        runner.run(found)
    record.say(f"{len(tally.pairs)} pairs, {len(tally.differing)} differ")
    rows = [{"event": name, "count": count} for name, count in sorted(tally.events.items())]
    record.show(rows)
    differing = len(tally.differing)
    record.emit("bits", {"pairs": options.pairs, "seed": seed}, rows, differing=differing)
    missing = [event for event in EVENTS if tally.events[event] < _OFTEN]
    if options.pairs >= _COMPLETE and missing:
        record.say(f"these took place less than {_OFTEN} times: {', '.join(missing)}")
    return 1 if tally.differing or (options.pairs >= _COMPLETE and missing) else 0


async def run(
    directory: Path,
    draw: Random,
    num_pairs: int,
    tally: Tally,
    kinds: Sequence[ComparedKind],
    explains: bool,
) -> None:
    """Compare pairs until there are `num_pairs`, and report each system.

    Args:
        explains: search for the circumstances that suffice for a difference. False: stop at one.
    """
    start = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        models = [
            await stack.enter_async_context(ComparedModel(directory / f"{number}", each).opened())
            for number, each in enumerate(kinds[: -(-num_pairs // (_ROUNDS * _IN_A_ROUND))])
        ]
        while len(tally.pairs) < num_pairs:
            model = models[len(tally.pairs) // (_ROUNDS * _IN_A_ROUND) % len(models)]
            system = Circumstances.of_a_system(draw, model.kind)
            rounds = min(_ROUNDS, -(-(num_pairs - len(tally.pairs)) // _IN_A_ROUND))
            known = len(tally.differing)
            around = [system.with_a_round(draw) for _ in range(rounds)]
            await model.compare(system, around, draw, tally)
            record.say(
                f"{time.monotonic() - start:5.0f} s: {len(tally.pairs)} pairs, "
                f"{len(tally.differing)} differ, {model.kind.name}, {system.differing}"
            )
            for pair in tally.differing[known : known + 1]:
                record.say(f"DIFFERS: {pair.difference}: {pair.around.differing}")
                if not explains:
                    return
                await _explain(model, pair)


async def _explain(model: ComparedModel, pair: ComparedPair) -> None:
    """Print the circumstances that suffice for a difference."""
    around = pair.around
    for name in around.differing:
        simpler = around.without(name)
        if await model.differs(pair, simpler):
            around = simpler
    record.say(f"these suffice: {around.differing}")


if __name__ == "__main__":
    sys.exit(main())

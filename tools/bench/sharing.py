"""Measure the gain of prefix sharing between nodes for conversations: TTFT and computed tokens.

    python -m tools.bench.sharing [--talks 6] [--turns 5] [--opening 512] [--says 64] [--answer 128]

Two systems of a router, two prefill nodes and two decode nodes each run on this machine's cores,
with random weights of Qwen3's shape and default flags. In one of them nodes share no prefixes. Both
run the same conversations and alternate: a turn of each conversation in the one system, then the
same in the other. The order changes each time. Every turn contains the previous turn, its response,
and the client's next message. Responses are greedy, and the same in both.

Figures of the first turn are left out, because sharing cannot help it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M

_MODEL = QWEN3_450M | {  # 40 million parameters: a prompt token takes a third of a millisecond
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_WARM_UP = 16  # short prompts from which nodes measure the time of a token
_WAYS = ("own", "fetched", "computed")
_FLAGS = ("--engine.cache.num-pages=2048", "--engine.threads=1")
_SYSTEMS = {"shared": (), "not shared": ("--no-sharing.enabled",)}


@dataclass(slots=True)
class _System:
    cluster: Cluster
    first_tokens: list[float] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)

    async def say(self, prompt: Sequence[int], answer: int) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and all tokens."""
        began, first, tokens = time.perf_counter(), 0.0, list[int]()
        messages = self.cluster.stream(prompt, max_tokens=answer, ignore_eos=True)
        async with aclosing(messages) as responses:
            async for response in responses:
                first = first or time.perf_counter() - began
                tokens += response.token_ids
        return first, tokens

    async def ways(self) -> dict[str, int]:
        """Return the tokens of prompts, by the source of their KV."""
        nodes = [await node.describe() for node in self.cluster.prefill]
        return {
            way: sum(node.counters[f"prompt_token_ways/{way}"] for node in nodes) for way in _WAYS
        }


@dataclass(frozen=True, slots=True)
class _Found:
    first_tokens: dict[str, list[float]]
    ways: dict[str, dict[str, int]]


async def measure(options: argparse.Namespace) -> _Found:
    draw = Random(7)
    talks = [_drawn(draw, options.opening) for _ in range(options.talks)]
    with tempfile.TemporaryDirectory(prefix="baton-sharing-") as directory:
        model = make_checkpoint(Path(directory) / "model", **_MODEL)
        async with AsyncExitStack() as stack:
            systems = {}
            for name, flags in _SYSTEMS.items():
                how: dict[str, Any] = {"num_prefill": 2, "num_decode": 2}
                cluster = Cluster(
                    model, Path(directory) / name, node_flags=(*_FLAGS, *flags), **how
                )
                systems[name] = _System(await stack.enter_async_context(cluster))
            for system in systems.values():
                for _ in range(_WARM_UP):
                    await system.say(_drawn(draw, 20), 1)
            for turn in range(options.turns):
                if turn == 1:
                    for system in systems.values():
                        system.before = await system.ways()
                said = [_drawn(draw, options.says) for _ in talks]
                names = list(systems)[:: 1 if turn % 2 else -1]
                heard = {name: await _turn(systems[name], talks, options, turn) for name in names}
                answers = heard[names[0]]
                if any(other != answers for other in heard.values()):
                    raise SystemExit("the two systems answer differently")
                talks = [
                    [*talk, *answer, *more]
                    for talk, answer, more in zip(talks, answers, said, strict=True)
                ]
            ways = {
                name: {way: now - system.before[way] for way, now in (await system.ways()).items()}
                for name, system in systems.items()
            }
            return _Found({name: each.first_tokens for name, each in systems.items()}, ways)


async def _turn(
    system: _System, talks: Sequence[Sequence[int]], options: argparse.Namespace, turn: int
) -> list[list[int]]:
    """Run one turn of each conversation, with limited concurrency. Returns the responses."""
    gate = asyncio.Semaphore(options.at_once)

    async def say(talk: Sequence[int]) -> list[int]:
        async with gate:
            first, tokens = await system.say(talk, options.answer)
        if turn:
            system.first_tokens.append(first)
        return tokens

    return await asyncio.gather(*map(say, talks))


def _drawn(draw: Random, count: int) -> list[int]:
    return [draw.randrange(2, 250) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--talks", type=int, default=6, help="conversations")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--opening", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--says", type=int, default=64, help="tokens that each turn adds")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--at-once", type=int, default=2, help="conversations")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    rows: list[dict[str, Any]] = [
        {"system": name, **record.percentiles(found.first_tokens[name], 1e3), **found.ways[name]}
        for name in _SYSTEMS
    ]
    columns = {"": "{system}", "TTFT p50 ms": "{p50}", "p90": "{p90}", "p99": "{p99}"}
    columns |= {"own cache": "{own}", "fetched": "{fetched}", "computed": "{computed}"}
    record.table(rows, columns)
    first = {name: statistics.median(told) for name, told in found.first_tokens.items()}
    ratio = first["shared"] / first["not shared"]
    computed = found.ways["shared"]["computed"] / found.ways["not shared"]["computed"]
    record.say(f"shared / not shared: TTFT p50 {ratio:.2f}, computed tokens {computed:.2f}")
    record.emit(
        "sharing",
        vars(options),
        rows,
        first_token_ratio=round(ratio, 3),
        computed_ratio=round(computed, 3),
    )


if __name__ == "__main__":
    main()

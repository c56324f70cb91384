"""Measure the gain of offload tiers for conversations whose prefix cache is too small.

    python -m tools.bench.tiers [--talks 6] [--turns 4] [--opening 1024] [--pages 256]
    [--tier-mib 1024] [--host-mib 64]

The figures are TTFT, computed tokens, and the cost for running responses. Three systems of a router
and a colocated node each run on this machine's cores, with random weights of Qwen3's shape. The
first has no tier. The second has a host memory tier that is large enough for all KV. The third has
a file tier of that size below little host memory. All run the same conversations in turns: a turn
of each conversation in one system, then the same in the next, in another order every time. When a
conversation continues, the others have taken its pages. Responses are greedy, and the same in all.

Figures of the first turn are left out, because a tier cannot help it. The gaps are those between
the tokens of responses, while other conversations' prompts are computed, copied and read. The gaps
of the first turn are shown apart: there all systems compute the same, and a system with a tier
saves and writes all of it. Finally the node with files is restarted and runs one more turn of each.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from node.control.engine_control import REPORT_INTERVAL_S
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, free_ports
from tests.support.scrapes import scraped, total
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M

MODEL = QWEN3_450M | {  # 40 million parameters: a prompt token takes a third of a millisecond
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
AGAIN = "files, node started again"
_PROMPT, _CACHED = "baton_prompt_tokens_total", "baton_cached_tokens_total"
_BROUGHT = {tier: ("baton_tier_tokens_total", {"tier": tier}) for tier in ("host", "file")}


@dataclass(slots=True)
class _System:
    cluster: Cluster
    metrics_port: int
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first_gaps: list[float] = field(default_factory=list)  # of the first turn
    counted: dict[str, float] = field(default_factory=dict)  # from the second turn on

    async def say(self, prompt: Sequence[int], answer: int, *, first: bool) -> list[int]:
        """Run one turn. `first` marks the first one."""
        began, last, tokens = time.perf_counter(), 0.0, list[int]()
        gaps = self.first_gaps if first else self.gaps
        messages = self.cluster.stream(prompt, max_tokens=answer, ignore_eos=True)
        async with aclosing(messages) as responses:
            async for response in responses:
                now = time.perf_counter()
                if response.token_ids and last:
                    gaps.append(now - last)
                elif response.token_ids and not first:
                    self.first_tokens.append(now - began)
                last = now
                tokens += response.token_ids
        return tokens

    async def count(self, sign: int) -> None:
        """Add the node's current counters, times the sign, once the engine has reported them."""
        await asyncio.sleep(2 * REPORT_INTERVAL_S)
        scrape = scraped(self.metrics_port)
        now = {name: total(scrape, name) for name in (_PROMPT, _CACHED)}
        now |= {tier: total(scrape, name, **labels) for tier, (name, labels) in _BROUGHT.items()}
        for name, number in now.items():
            self.counted[name] = self.counted.get(name, 0.0) + sign * number

    async def restarted(self) -> "_System":
        """Return the same system with its node restarted and without counts."""
        (node,) = self.cluster.decode
        await self.cluster.kill(node)
        await self.cluster.start_again(node)

        async def answers() -> bool:
            try:
                await self.cluster.generate([2, 3], max_tokens=1)
            except grpc.aio.AioRpcError:
                return False
            return True

        await self.cluster.wait_until(answers, "the node answers again")
        return _System(self.cluster, self.metrics_port)


async def measure(options: argparse.Namespace) -> dict[str, _System]:
    draw = Random(7)
    talks = [_drawn(draw, options.opening) for _ in range(options.talks)]
    flags = (f"--engine.cache.num-pages={options.pages}", "--engine.threads=1")
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as directory:
        model = make_checkpoint(Path(directory) / "model", **MODEL)
        own: dict[str, tuple[str, ...]] = {
            "host memory": (f"--engine.tiers.host-bytes={options.tier_mib << 20}",),
            "files": (
                f"--engine.tiers.host-bytes={options.host_mib << 20}",
                f"--engine.tiers.file-dir={directory}/pages",
                f"--engine.tiers.file-bytes={options.tier_mib << 20}",
            ),
            "no tier": (),
        }
        async with AsyncExitStack() as stack:
            systems = {}
            for name, ports in zip(own, free_ports(len(own)), strict=True):
                cluster = Cluster(
                    model,
                    Path(directory) / name,
                    num_prefill=0,
                    decode_flags=("--mode=colocated", f"--metrics-port={ports}"),
                    node_flags=(*flags, *own[name]),
                )
                systems[name] = _System(await stack.enter_async_context(cluster), ports)
            for turn in range(options.turns):
                if turn == 1:
                    for system in systems.values():
                        await system.count(-1)
                names = list(systems)[turn % 3 :] + list(systems)[: turn % 3]
                heard = {name: await _turn(systems[name], talks, options, turn) for name in names}
                talks = _go_on(talks, heard, draw, options)
            for system in systems.values():
                await system.count(1)
            again = systems[AGAIN] = await systems["files"].restarted()
            heard = {AGAIN: await _turn(again, talks, options, options.turns)}
            heard["no tier"] = await _turn(
                _System(systems["no tier"].cluster, 0), talks, options, 0
            )
            _go_on(talks, heard, draw, options)
            await again.count(1)
    return systems


def _go_on(
    talks: Sequence[Sequence[int]],
    heard: Mapping[str, list[list[int]]],
    draw: Random,
    options: argparse.Namespace,
) -> list[list[int]]:
    """Return the next prompts, which contain the previous responses."""
    answers = heard["no tier"]
    if any(other != answers for other in heard.values()):
        raise SystemExit("the systems answer differently")
    pairs = zip(talks, answers, strict=True)
    return [[*talk, *answer, *_drawn(draw, options.says)] for talk, answer in pairs]


async def _turn(
    system: _System, talks: Sequence[Sequence[int]], options: argparse.Namespace, turn: int
) -> list[list[int]]:
    """Run one turn of each conversation, with limited concurrency. Returns the responses."""
    gate = asyncio.Semaphore(options.at_once)

    async def say(talk: Sequence[int]) -> list[int]:
        async with gate:
            return await system.say(talk, options.answer, first=turn == 0)

    return await asyncio.gather(*map(say, talks))


def _drawn(draw: Random, count: int) -> list[int]:
    return [draw.randrange(2, 250) for _ in range(count)]


def _row(name: str, system: _System) -> dict[str, Any]:
    kept = {"first": system.first_tokens, "gap": system.gaps, "first_gap": system.first_gaps}
    counted = system.counted
    brought = {tier: counted[tier] for tier in _BROUGHT}
    found = {"device": counted[_CACHED] - sum(brought.values()), **brought}
    shares = {tier: tokens / counted[_PROMPT] for tier, tokens in found.items()}
    return {
        "system": name,
        **{
            f"{what}_{each}": number
            for what, seconds in kept.items()
            for each, number in record.percentiles(seconds, 1e3).items()
        },
        **{each: round(share, 3) for each, share in shares.items()},
        "computed": int(counted[_PROMPT] - counted[_CACHED]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--talks", type=int, default=6, help="conversations")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--opening", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--says", type=int, default=64, help="tokens that each turn adds")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--at-once", type=int, default=2, help="conversations")
    parser.add_argument("--pages", type=int, default=256, help="of 16 tokens, on the device")
    parser.add_argument("--tier-mib", type=int, default=1024)
    parser.add_argument("--host-mib", type=int, default=64, help="above files")
    options = parser.parse_args()
    systems = asyncio.run(measure(options))
    rows = [_row(name, system) for name, system in systems.items()]
    columns = {"": "{system}", "TTFT p50 ms": "{first_p50}", "p90": "{first_p90}"}
    columns |= {"p99": "{first_p99}", "gap p50 ms": "{gap_p50}", "gap p99": "{gap_p99}"}
    columns |= {"first turn gap p50": "{first_gap_p50}", "first turn gap p99": "{first_gap_p99}"}
    columns |= {"found on device": "{device:.0%}", "in host memory": "{host:.0%}"}
    columns |= {"in files": "{file:.0%}"}
    record.table(rows, columns | {"computed": "{computed}"})
    first = {name: statistics.median(system.first_tokens) for name, system in systems.items()}
    ratios = {name: round(each / first["no tier"], 3) for name, each in first.items()}
    record.say(f"TTFT p50 over that without a tier: {ratios}")
    record.emit("tiers", vars(options), rows, first_token_ratios=ratios)


if __name__ == "__main__":
    main()

"""Simulate conversations with a hybrid model: prefix cache hits and TTFT, by placement of states.

    python -m tools.bench.hybrids [--talks 32] [--turns 6] [--pages 4000] [--chunk 2048]

The simulation uses the engine's own scheduler, page pool and prefix cache. The model has no
weights, and detects any wrong page or state. Its time is a cost model of about an 8B model on a
recent GPU: 10 ms a forward and 1/12 ms a token. Pages and states are Qwen3-Next's (64 tokens, 50
pages a state). Conversations begin with one of a few system prompts, start at random times, and
continue some time after each response. The same conversations run with

    kept          states where the product keeps them (engine/scheduler/boundaries.py)
    chunk ends    states at the ends of a prompt's forwards, if those are at a page's edge
    no cache      no prefix cache
    KV alone      as if all layers kept keys and values: the upper limit for a hybrid

and receive the same responses. A run is deterministic.
"""

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from common.config import SchedulerConfig
from engine.scheduler import admission
from engine.scheduler.boundaries import ChunkRange, stretch
from tests.support.engine_rig import VOCABULARY, Rig
from tools.bench.support import record

_PAGE_SIZE, _STATE_PAGES = 64, 50
_STEP_S, _TOKEN_S = 0.01, 1 / 12_000
_OPENINGS, _OPENING = 6, (600, 3000)  # system prompts, and their tokens
_SAYS, _ANSWER, _PAUSE_S = (20, 400), (20, 200), 8.0
_APART_S = 0.7  # between the starts of two conversations


def _at_chunk_ends(
    start: int, end: int, *, num_tokens: int, branch: int, page_size: int
) -> ChunkRange:
    return ChunkRange(end, end - start if end % page_size == 0 else 0)


@dataclass(frozen=True)
class _System:
    name: str
    state_pages: int = _STATE_PAGES
    prefix_cache: bool = True
    keeps: Any = stretch


_SYSTEMS = (
    _System("kept"),
    _System("chunk ends", keeps=_at_chunk_ends),
    _System("no cache", prefix_cache=False),
    _System("KV alone", state_pages=0),
)


@dataclass
class _Talk:
    """One conversation: its text so far, and its future turns."""

    number: int
    tokens: list[int]
    says: list[list[int]]
    answers: list[int]  # tokens
    pauses: list[float]
    turn: int = 0


@dataclass
class _Seen:
    """Results of one system, from the second turn on unless noted otherwise."""

    first_tokens: list[float] = field(default_factory=list)
    openings: list[float] = field(default_factory=list)  # TTFT of first turns
    cached: int = 0
    asked: int = 0
    computed: int = 0  # in all turns
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by talk and turn


def _talks(options: argparse.Namespace) -> list[tuple[float, _Talk]]:
    draw = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    openings = [tokens(draw.randint(*_OPENING)) for _ in range(_OPENINGS)]
    at, talks = 0.0, []
    for number in range(options.talks):
        at += draw.expovariate(1 / _APART_S)
        says = [tokens(draw.randint(*_SAYS)) for _ in range(options.turns)]
        talk = _Talk(
            number,
            list(draw.choice(openings)),
            says,
            [draw.randint(*_ANSWER) for _ in says],
            [draw.expovariate(1 / _PAUSE_S) for _ in says],
        )
        talks.append((at, talk))
    return talks


def hold(system: _System, options: argparse.Namespace) -> _Seen:
    """Run all conversations to their ends."""
    rig = Rig(
        num_pages=options.pages,
        page_size=_PAGE_SIZE,
        state_pages=system.state_pages,
        num_slots=64,
        context=16_384,
        host_pages=0,
        prefix_cache=system.prefix_cache,
        overlap=False,
        vandal=False,
        config=SchedulerConfig(chunk_tokens=options.chunk),
    )
    seen = _Seen()
    coming = [(at, talk.number, talk) for at, talk in _talks(options)]
    heapq.heapify(coming)
    under_way: dict[int, tuple[float, _Talk]] = {}  # start times by key
    begun: set[int] = set()  # keys with a first token
    now = 0.0
    while coming or under_way:
        if not under_way:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, _, talk = heapq.heappop(coming)
            talk.tokens += talk.says[talk.turn]
            request = rig.add(talk.tokens, talk.answers[talk.turn])
            under_way[request.key] = (at, talk)
        before = rig.runner.num_tokens
        rig.in_flight = rig.loop.step(rig.in_flight)
        now += _STEP_S + (rig.runner.num_tokens - before) * _TOKEN_S
        for key, (at, talk) in list(under_way.items()):
            request = rig.requests[key]
            if rig.tokens[key] and key not in begun:
                begun.add(key)
                if talk.turn:
                    seen.first_tokens.append(now - at)
                    seen.cached += request.cached_tokens
                    seen.asked += request.num_prompt
                else:
                    seen.openings.append(now - at)
            if key in rig.finished:
                del under_way[key]
                talk.tokens += rig.tokens[key]
                seen.answers[talk.number, talk.turn] = rig.tokens[key]
                talk.turn += 1
                if talk.turn < options.turns:
                    heapq.heappush(coming, (now + talk.pauses[talk.turn], talk.number, talk))
    rig.assert_at_rest()
    seen.computed = rig.runner.num_tokens
    return seen


def _row(system: _System, seen: _Seen) -> dict[str, Any]:
    first, opening = record.percentiles(seen.first_tokens, 1e3), seen.openings
    return {
        "system": system.name,
        "hit": round(seen.cached / seen.asked, 3),
        **{f"first_{name}": number for name, number in first.items()},
        "opening_p50": record.percentiles(opening, 1e3)["p50"],
        "computed": seen.computed,
    }


def _measure(systems: Sequence[_System], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, answers = [], None
    for system in systems:
        with patch.object(admission, "stretch", system.keeps):
            seen = hold(system, options)
        if answers not in (None, seen.answers):
            raise SystemExit(f"{system.name} answers differently")
        answers = seen.answers
        rows.append(_row(system, seen))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--talks", type=int, default=32, help="conversations")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pages", type=int, default=4000, help="of 64 tokens")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens")
    options = parser.parse_args()
    rows = _measure(_SYSTEMS, options)
    columns = {"states": "{system}", "found in the cache": "{hit:.0%}"}
    columns |= {"TTFT p50 ms": "{first_p50:.0f}", "p90": "{first_p90:.0f}"}
    columns |= {"p99": "{first_p99:.0f}", "first turns' p50": "{opening_p50:.0f}"}
    record.table(rows, columns | {"tokens computed": "{computed}"})
    record.emit("hybrids", vars(options), rows)


if __name__ == "__main__":
    main()

"""Simulate routing policies on a trace with shared prefixes.

    python -m tools.bench.routing [--requests 6000] [--traces groups dominated unique] [--routers 4]

The router's own Policy, NodeLoad and PrefixIndex place the requests of one trace on stub nodes.
Their prefix caches are the engine's own, and their time is a cost model's
(tools/bench/routing/nodes.py). A run opens no sockets and is deterministic except for the CPU time
of a pick, whose median is printed.

Traces: `groups` has 64 prefixes of 512 to 4096 tokens, by Zipf's law. In `dominated` one of them
begins 80 % of the requests. In `unique` no prefix is shared. Users of a group are sessions. All
policies get the same load: the highest that round robin can sustain.
"""

import argparse
import heapq
import itertools
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from router.policy import DecodeChoice, PlacementKey, PrefillChoice, make_policy
from router.policy.load import NodeLoad
from router.policy.prefix_index import PrefixIndex
from router.policy.table import NAMES
from tools.bench.routing.nodes import PAGE_SIZE, Arrival, Costs, DecodeNode, PrefillNode
from tools.bench.routing.told import ToldTally
from tools.bench.support import record

TRACES = ("groups", "dominated", "unique")
VOCABULARY = 128_000
PER_S = {"groups": 105.0, "dominated": 160.0, "unique": 34.0}


@dataclass(frozen=True)
class Scale:
    num_prefill: int = 8
    num_decode: int = 4
    cache_tokens: int = 96_000  # of each prefill node: 64 prefixes together have half as many more
    decode_pages: int = 40_000
    num_groups: int = 64
    users_per_group: int = 16
    zipf: float = 1.1
    dominating: float = 0.8  # share of the one prefix in `dominated`


def make_trace(name: str, scale: Scale, num_requests: int, per_s: float) -> list[Arrival]:
    """Return Poisson arrivals, `per_s` of them each second."""
    rng = random.Random(name)

    def tokens(count: int) -> "array[int]":
        return array("I", [rng.randrange(VOCABULARY) for _ in range(count)])

    groups = range(scale.num_groups)
    prefixes = [tokens(rng.randrange(512, 4096)) for _ in groups]
    weights = [1 / (rank + 1) ** scale.zipf for rank in groups]
    if name == "dominated":
        prefixes[0] = tokens(3072)
        rest = sum(weights[1:])
        weights[0] = rest * scale.dominating / (1 - scale.dominating)
    arrivals = []
    at = 0.0
    for number in range(num_requests):
        at += rng.expovariate(per_s)
        if name == "unique":
            prompt, session = tokens(rng.randrange(512, 4096)), str(number)
        else:
            (group,) = rng.choices(groups, weights)
            prompt = prefixes[group] + tokens(rng.randrange(32, 512))
            session = f"{group}-{rng.randrange(scale.users_per_group)}"
        arrivals.append(Arrival(at, prompt, session, int(rng.expovariate(1 / 150)) + 1))
    return arrivals


class Router:
    """The state of one router: its view of the nodes, and its policy."""

    def __init__(
        self, policy: str, seed: int, clock: Callable[[], float], tokens_per_s: float
    ) -> None:
        self.load, self.index = NodeLoad(), PrefixIndex(clock=clock)
        self.load.prefill = self.tally = ToldTally(clock, tokens_per_s)
        self.policy = make_policy(policy, self.load, self.index, random.Random(seed))


class Simulation:
    """One policy on one trace, with a clock that jumps from event to event."""

    def __init__(
        self,
        policy: str,
        scale: Scale,
        costs: Costs,
        *,
        events: bool,
        num_routers: int = 1,
        told_s: float = 0.0,
    ) -> None:
        """Set up a simulation.

        Args:
            events: the nodes report their cached prefixes. Otherwise a router has only its own
                history.
            num_routers: number of routers, to which clients are assigned at random. They learn of
                each other only through the nodes.
            told_s: interval at which a prefill node reports its queue to all routers; 0: never.
        """
        self._costs = costs
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._routers = [
            Router(policy, i + 1, lambda: self._now, 1 / costs.token_s) for i in range(num_routers)
        ]
        self._told_s = told_s
        self._dealing = random.Random(num_routers)
        self._prefill = {
            f"p{i}": PrefillNode(
                costs, scale.cache_tokens, self._after, self._teller(f"p{i}", events)
            )
            for i in range(scale.num_prefill)
        }
        self._decode = {f"d{i}": DecodeNode(scale.decode_pages) for i in range(scale.num_decode)}
        self._links = tuple(PrefillChoice(address, "rdma", 20.0) for address in self._prefill)
        self._told_free = {address: node.num_pages for address, node in self._decode.items()}
        self._num_left = 0
        self._ttfts: list[float] = []
        self._picks_s: list[float] = []

    def run(self, trace: Sequence[Arrival]) -> dict[str, Any]:
        self._num_left = len(trace)
        for arrival in trace:
            self._after(arrival.at, partial(self._arrive, arrival))
        for address in self._decode:
            self._after(self._costs.status_s, partial(self._status, address))
        if self._told_s:
            for number, address in enumerate(self._prefill):  # staggered
                first_s = self._told_s * (number + 1) / len(self._prefill)
                self._after(first_s, partial(self._tell_waiting, address))
        while self._due:
            self._now, _, happen = heapq.heappop(self._due)
            happen()
        if not all(router.load.empty for router in self._routers):
            raise RuntimeError("load is left without a request")
        return self._row(trace)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._now + seconds, next(self._numbers), happen))

    def _teller(self, address: str, events: bool) -> Callable[[Sequence[int], Sequence[int]], None]:
        def tell(stored: Sequence[int], removed: Sequence[int]) -> None:
            for router in self._routers if events else ():
                router.index.changed(
                    address, PAGE_SIZE, cleared=False, stored=stored, removed=removed
                )

        tell((), ())
        return tell

    def _arrive(self, arrival: Arrival) -> None:
        choices = [
            DecodeChoice(address, self._links, node.num_pages, self._told_free[address])
            for address, node in self._decode.items()
        ]
        router = self._dealing.choice(self._routers)
        prompt = PlacementKey(arrival.token_ids.tolist(), arrival.session)  # as from a tokenizer
        began = time.thread_time()
        placement = router.policy.pick(prompt, choices)
        self._picks_s.append(time.thread_time() - began)
        charge = router.load.charge(placement, len(arrival.token_ids))
        decode = self._decode[placement.decode]
        num_pages = -(-(len(arrival.token_ids) + arrival.num_output) // PAGE_SIZE)

        def first_token() -> None:
            charge.first_token()
            self._ttfts.append(self._now - arrival.at)
            decode.change(num_pages, self._now)
            self._after(arrival.num_output * self._costs.step_s, end)

        def end() -> None:
            charge.close()
            decode.change(-num_pages, self._now)
            self._num_left -= 1

        node = self._prefill[placement.prefill[0]]
        node.submit(arrival, lambda: self._after(self._costs.handoff_s, first_token))

    def _status(self, address: str) -> None:
        node = self._decode[address]
        self._told_free[address] = node.num_pages - node.used
        for router in self._routers:
            router.load.shown(address)
        if self._num_left:
            self._after(self._costs.status_s, lambda: self._status(address))

    def _tell_waiting(self, address: str) -> None:
        num_tokens = sum(router.tally.own(address) for router in self._routers)
        for router in self._routers:
            router.tally.told(address, num_tokens)
        if self._num_left:
            self._after(self._told_s, partial(self._tell_waiting, address))

    def _row(self, trace: Sequence[Arrival]) -> dict[str, Any]:
        busy = [node.busy_s for node in self._prefill.values()]
        used = [node.mean_used(self._now) for node in self._decode.values()]
        prompt_tokens = sum(len(arrival.token_ids) for arrival in trace)
        cached = sum(node.cached_tokens for node in self._prefill.values())
        return {
            "hit_rate": round(cached / prompt_tokens, 3),
            **{
                f"ttft_{name}_ms": value
                for name, value in record.percentiles(self._ttfts, 1e3, 0).items()
            },
            "balance": round(max(busy) * len(busy) / sum(busy), 2),
            "most_queued": max(node.most_queued for node in self._prefill.values()),
            "decode_balance": round(max(used) * len(used) / sum(used), 2),
            "busy": round(sum(busy) / len(busy) / trace[-1].at, 2),
            "pick_us": record.percentiles(self._picks_s, 1e6, 1)["p50"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--policies", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--per-s", type=float, help="arrivals each second; default: by trace")
    parser.add_argument("--cache-tokens", type=int, default=Scale.cache_tokens)
    parser.add_argument("--routers", type=int, default=1, help="clients are dealt among them")
    parser.add_argument(
        "--told-s", type=float, default=0.0, help="prefill nodes tell what waits there so often"
    )
    arguments = parser.parse_args()
    scale, costs = Scale(cache_tokens=arguments.cache_tokens), Costs()
    rows = []
    for name in arguments.traces:
        per_s = arguments.per_s or PER_S[name]
        trace = make_trace(name, scale, arguments.requests, per_s)
        record.say(f"\n{name}: {len(trace)} requests, {per_s:g} a second")
        mine = []
        for policy in arguments.policies:
            variants = (True, False) if policy == "prefix_aware" else (True,)
            for events in variants:
                label = policy if events else f"{policy}, history alone"
                simulation = Simulation(
                    policy,
                    scale,
                    costs,
                    events=events,
                    num_routers=arguments.routers,
                    told_s=arguments.told_s,
                )
                row = simulation.run(trace)
                mine.append({"trace": name, "per_s": per_s, "policy": label, **row})
        record.table(
            mine,
            {
                "policy": "{policy}",
                "hit rate": "{hit_rate:.0%}",
                "TTFT p50": "{ttft_p50_ms:.0f} ms",
                "p99": "{ttft_p99_ms:.0f} ms",
                "busiest node / mean": "{balance:.2f}",
                "longest queue": "{most_queued}",
                "decode pages max / mean": "{decode_balance:.2f}",
                "busy": "{busy:.0%}",
                "pick": "{pick_us:.0f} us",
            },
        )
        rows += mine
    record.emit(
        "routing",
        {
            "requests": arguments.requests,
            "routers": arguments.routers,
            "told_s": arguments.told_s,
            **asdict(scale),
            **asdict(costs),
        },
        rows,
    )


if __name__ == "__main__":
    main()

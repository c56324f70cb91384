"""Random workloads, compared with the oracle, with all accounting checked after every step."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from common.requests.namespace import namespace_of
from engine.batch.request import Request
from tests.support.engine.engine_rig import Rig
from tests.support.engine.fake_backend import VOCABULARY, foretold
from tests.support.models.drafters import KINDS, speculator

pytestmark = pytest.mark.slow

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


def make_rig(rng: random.Random, *, pressure: bool, urgent: bool, **options: object) -> Rig:
    """Return a rig. Under pressure the pool is small, little growth is reserved, and few
    requests stop early."""
    page_size = rng.choice((16, 16, 16, 64))
    num_pages = rng.choice((4, 6, 10, 16) if pressure else (16, 40, 120))
    return Rig(
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=rng.choice((3, 8, 16) if pressure else (1, 3, 8, 16)),
        context_length=rng.choice((128, 512)),
        swap_pages=rng.choice((0, 3, num_pages)),
        eos=() if pressure else rng.choice(((5,), (5, 11, 12))),
        overlap_schedule=rng.random() < 0.7,
        overlap_prefills=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.8,
        lifo=rng.random() < 0.7,
        policy=rng.choice(POLICIES),
        chunked_prefill_tokens=rng.choice((-1, 16, 64, 100)),
        max_prefill_tokens=rng.choice((1, 64, 16384)),
        mixed_chunk=rng.random() < 0.4,
        new_token_ratio=0.1 if pressure else rng.choice((0.3, 0.7)),
        min_new_token_ratio=0.01,
        new_token_ratio_steps=rng.choice((1, 50)),
        preemption_threshold=rng.choice((1, 5)) if urgent else 0,
        max_preempted_requests=rng.choice((1, 3, 16)) if urgent else 1,
        max_cached_pages=rng.choice((0, 0, 4)),
        max_prefill_requests=rng.choice((0, 0, 2)),
        retract_every=rng.choice((0, 0, 3)),
        **options,
    )


@dataclass
class Traffic:
    """Requests that arrive, are handed over with their KV, and are aborted, at random."""

    rig: Rig
    rng: random.Random
    left: int
    pressure: bool
    aborts: bool
    joins: bool
    num_namespaces: int
    priorities: Sequence[int] = (0,)
    live: list[Request] = field(default_factory=list)
    landing: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(100)] for _ in range(3)]
        pool = self.rig.table.tables.max_tokens(self.rig.num_pages)
        self.longest = min(self.rig.options.context_length - 2, pool - 1, 300)

    @property
    def over(self) -> bool:
        return not (self.left or self.landing or self.rig.landed or self.rig.has_work)

    def poll(self) -> None:
        if self.left and self.rng.random() < 0.4:
            self.left -= 1
            self._arrive()
        if self.rng.random() < 0.5:
            self.rig.join_landed()
        self._land()
        if self.aborts and self.live and self.rng.random() < 0.1:
            self.rig.abort(self.live.pop(self.rng.randrange(len(self.live))))

    def _land(self) -> None:
        """Grant pages to hand-offs, as a decode node does."""
        scheduler = self.rig.scheduler
        while self.landing and self._may_land(self.landing[0]) and self.rig.land(self.landing[0]):
            self.landing.pop(0)
        scheduler.kept.most_urgent = -math.inf
        if scheduler.preempts and self.landing:
            first = self.landing[0]
            num_pages = self.rig.table.tables.pages_for(len(first.token_ids))
            scheduler.preempt_for(first.spec.priority, num_pages)
            scheduler.kept.most_urgent = first.spec.priority

    def _may_land(self, request: Request) -> bool:
        scheduler = self.rig.scheduler
        return not scheduler.preempts or request.spec.priority >= scheduler.min_priority

    def _arrive(self) -> None:
        rng = self.rng
        prompt = self._tokens()
        num_generated = rng.randrange(len(prompt)) if rng.random() < 0.2 else 0
        joins = self.joins and rng.random() < 0.5 and len(prompt) > 1
        if joins:
            num_generated = max(num_generated, 1)
        at = len(prompt) - num_generated
        request = self.rig.request(
            prompt[:at],
            rng.choice((100, 200, 400) if self.pressure else (1, 2, 20, 200)) + num_generated,
            generated=prompt[at:],
            stop=(7, 8) if not self.pressure and rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.3,
            namespace=namespace_of(str(len(self.rig.requests) % self.num_namespaces)),
            suspect=len(self.rig.requests) % 5 == 2,
            priority=self.priorities[len(self.rig.requests) % len(self.priorities)],
        )
        if joins:
            self.landing.append(request)
            self.landing.sort(key=lambda each: -each.spec.priority)
        else:
            self.rig.come(request)
            self.live.append(request)

    def _tokens(self) -> list[int]:
        """Return tokens. Some share a beginning with others. Lengths are often near page
        boundaries."""
        rng = self.rng
        stem = rng.choice(self.stems)[: rng.choice((0, 16, 32, 48, 64, 100))]
        edges = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
        length = rng.choice((*edges, rng.randint(1, self.longest)))
        return [*stem, *(rng.randrange(VOCABULARY) for _ in range(length))][: self.longest]


def run_workload(seed: int, *, pressure: bool, urgent: bool = False, **options: object) -> Rig:
    """Run one workload. `urgent`: some requests are urgent, and preempt others."""
    rng = random.Random(seed)
    rig = make_rig(rng, pressure=pressure, urgent=urgent, **options)
    rig.copier.delays.extend(random.Random(seed).choices((0, 0, 1, 2, 7), k=1000))
    traffic = Traffic(
        rig,
        rng,
        left=rng.randint(5, 20),
        pressure=pressure,
        aborts=rng.random() < 0.4,
        joins=rng.random() < 0.5,
        num_namespaces=1 + seed % 3,
        priorities=(0, 5, -5, 0, 1) if urgent else (0,),
    )
    rig.before_poll.append(traffic.poll)
    rig.run_until(lambda: traffic.over, max_steps=20000)
    assert len(rig.sent) == len(rig.requests)
    rig.complete()
    return rig


MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 15)]


@pytest.mark.parametrize("pressure", [False, True], ids=["room", "pages run out"])
@pytest.mark.parametrize("seed", [*range(3), *MORE_SEEDS])
def test_every_request_gets_the_oracles_tokens(seed, pressure):
    run_workload(seed, pressure=pressure)


@pytest.mark.parametrize("seed", [*range(3), *MORE_SEEDS])
def test_every_request_gets_the_oracles_tokens_with_preemption(seed):
    run_workload(seed, pressure=True, urgent=True)


@pytest.mark.parametrize("tier_pages", [6, 300])
@pytest.mark.parametrize("seed", [*range(3), *MORE_SEEDS])
def test_every_request_gets_the_oracles_tokens_with_an_offload_tier(seed, tier_pages):
    run_workload(seed, pressure=True, urgent=seed % 2 > 0, tier_pages=tier_pages)


@pytest.mark.parametrize("seed", [*range(3), *MORE_SEEDS])
def test_every_request_gets_the_oracles_tokens_when_prompts_are_split(seed):
    """With states, a window, an offload tier and drafts, too. A group is one layer of a page, or
    more."""
    foretell = partial(foretold, vocabulary_size=VOCABULARY)
    drafts = speculator(KINDS[seed % 3], foretell, VOCABULARY, max_drafts=1 + seed % 7, seed=seed)
    run_workload(
        seed,
        pressure=seed % 2 > 0,
        urgent=seed % 4 > 2,
        tier_pages=(0, 6)[seed % 2],
        state_pages=2 if seed % 6 == 2 else 0,
        windows=(None, 40) if seed % 10 == 4 else (None,),
        speculator=(None, drafts)[seed % 3 == 1],
        split_prefill_ms=0.001 if seed % 4 == 3 else 20.0,
    )


@pytest.mark.long
def test_the_workloads_split_prompts_and_drop_some():
    rigs = [run_workload(seed, pressure=False, split_prefill_ms=20.0) for seed in range(40, 50)]
    groups = [batch.layers for rig in rigs for batch in rig.runner.batches if batch.layers]
    assert sum(group.is_last for group in groups) > 20
    assert sum(group.drops for group in groups) > 2


@pytest.mark.parametrize("seed", [*range(3), *MORE_SEEDS])
def test_every_request_gets_the_oracles_tokens_with_drafts(seed):
    kind = KINDS[seed % 3]
    foretell = partial(foretold, vocabulary_size=VOCABULARY)
    drafts = speculator(kind, foretell, VOCABULARY, max_drafts=1 + seed % 7, seed=seed)
    urgent, tier_pages = seed % 4 > 2, (0, 6, 300)[seed // 3 % 3]
    run_workload(
        seed, pressure=seed % 2 > 0, urgent=urgent, tier_pages=tier_pages, speculator=drafts
    )


@pytest.mark.long
def test_the_workloads_reach_their_purpose():
    rigs = [run_workload(seed, pressure=True) for seed in range(40, 50)]
    counters = [rig.scheduler.counters() for rig in rigs]
    batches = [batch for rig in rigs for batch in rig.runner.batches]
    assert sum(c["retractions"] for c in counters) > 20
    assert sum(c["recomputed"] for c in counters) > 5
    assert sum(batch.swap_in is not None for batch in batches) > 5
    assert sum(c["cached_tokens"] for c in counters) > 0
    assert sum(len(rig.trials) for rig in rigs) > 20

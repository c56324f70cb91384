"""Random events, of every kind, on two prefill and two decode nodes at the same time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from common.config import TransferConfig
from common.pausing import PauseMode
from engine.batch.request import FinishReason
from kvtransfer.messages import (
    CancelHandoff,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    Heartbeat,
    OpenHandoff,
    PagesReady,
    PagesReleased,
    ReadsDone,
)
from node.messages import AbortRequests, ContinueGeneration, FlushCache, PauseGeneration
from tests.pair.rig import Asked, PairRig, Size

pytestmark = pytest.mark.slow

NUM_ACTIONS = 70
MAX_LIVE = 16
MAX_TOKENS = 40
PROMPT_TOKENS = (1, 15, 16, 17, 31, 48, 70, 100)
IMPATIENT = TransferConfig(
    heartbeat_s=0.1,
    max_missed_heartbeats=10,
    release_timeout_s=0.5,
    read_timeout_s=0.5,
    canary_tokens=0,
)
KINDS = (
    OpenHandoff,
    GrantHandoff,
    HandoffAdmitted,
    PagesReady,
    ReadsDone,
    PagesReleased,
    CancelHandoff,
    HandoffFailed,
    Heartbeat,
)


@dataclass(eq=False)
class Walk:
    """One run. It records every event that may end a request early. All other requests must
    complete."""

    rig: PairRig
    source: random.Random
    prompts: list[list[int]]
    nodes: dict[Asked, int] = field(default_factory=dict)  # the decode node of each request
    doomed: set[Asked] = field(default_factory=set)
    hurried: set[Asked] = field(default_factory=set)  # with hardly any time
    pauses: bool = False  # an operator's actions

    def step(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (14, self.ask),
            (3, self.cancel),
            (1, self.abort),
            (2, lambda: self.faults().freeze()),
            (3, self.release),
            (1, lambda: self.faults().delay(0.005)),
            (1, lambda: self.faults().fail_next("by the walk")),
            (1, lambda: self.faults().truncate_next("by the walk")),
            (1, self.cut),
            (2, self.rig.wires.heal),
            (2, lambda: self.rig.wires.hold_back(self.source.choice(KINDS))),
            (4, self.rig.wires.release),
            (1, lambda: self.rig.command(self.source.choice(self.rig.nodes), FlushCache())),
        ]
        if self.pauses:
            actions += [(4, self.pause), (6, self.resume)]
        weights, calls = zip(*actions, strict=True)
        self.source.choices(calls, weights)[0]()
        for _ in range(self.source.choice((0, 1, 1, 3, 12))):
            some = self.source.sample(self.rig.nodes, self.source.choice((1, 2, 4)))
            self.rig.turn(*some)

    def live(self) -> list[Asked]:
        return [one for one in self.rig.asked if one.ended is None]

    def ask(self) -> None:
        if len(self.live()) >= MAX_LIVE:
            return
        hurried = self.source.random() < 0.1
        node = self.source.randrange(2)
        asked = self.rig.ask(
            self.source.choice(self.prompts),
            self.source.choice((1, 4, 20, MAX_TOKENS)),
            node=node,
            prefill=self.source.sample(range(2), self.source.choice((0, 1, 2, 2, 2))),
            budget_s=0.05 if hurried else 300.0,
        )
        self.nodes[asked] = node
        if hurried:
            self.hurried.add(asked)

    def cancel(self) -> None:
        if live := self.live():
            asked = self.source.choice(live)
            self.doomed.add(asked)
            self.rig.cancel(asked, self.nodes[asked])

    def abort(self) -> None:
        """Abort a request as an operator of any node. At a producer this ends only the hand-off."""
        if live := self.live():
            asked, node = self.source.choice(live), self.source.choice(self.rig.nodes)
            if node in self.rig.decode:
                self.doomed.add(asked)
            self.rig.command(node, AbortRequests(f"request {asked.number}"))

    def pause(self) -> None:
        mode = self.source.choice(("retract", "in_place"))
        self.rig.command(self.source.choice(self.rig.nodes), PauseGeneration(PauseMode(mode)))

    def resume(self) -> None:
        self.rig.command(self.source.choice(self.rig.nodes), ContinueGeneration())

    def faults(self):
        return self.source.choice(self.rig.faults)

    def release(self) -> None:
        faults = self.faults()
        faults.delay(0.0)
        faults.release()

    def cut(self) -> None:
        sides = self.source.choice((["consumer", "producer"], ["consumer"], ["producer"]))
        producer, consumer = (
            self.source.choice(self.rig.prefill),
            self.source.choice(self.rig.decode),
        )
        self.rig.wires.cut(producer.front, consumer.front, sides)

    def end(self) -> None:
        """Inject no more faults, and let every remaining request complete."""
        self.rig.wires.release()
        self.rig.wires.heal()
        for faults in self.rig.faults:
            faults.delay(0.0)
            faults.release()
        for node in self.rig.nodes if self.pauses else ():
            self.rig.command(node, ContinueGeneration())
        self.rig.run()


@pytest.mark.parametrize(
    "seed, pauses",
    [
        (0, False),
        *(pytest.param(seed, False, marks=pytest.mark.long) for seed in range(1, 5)),
        *(pytest.param(seed, True, marks=pytest.mark.long) for seed in range(10, 20)),
    ],
)
def test_every_request_ends_once_and_correctly(known, seed, pauses):
    source = random.Random(seed)
    stem = [source.randrange(320) for _ in range(max(PROMPT_TOKENS))]
    other = stem[:40] + stem[:10:-1]  # with two pages in common
    prompts = [tokens[:length] for tokens in (stem, other) for length in PROMPT_TOKENS]
    with PairRig(
        known.loaded,
        prefill=[
            Size(num_pages=20, max_running_requests=3),
            Size(num_pages=9, prefix_cache=seed % 2 == 0),
        ],
        decode=[Size(num_pages=10, max_running_requests=4), Size(num_pages=14, swap_pages=4)],
        chunked_prefill_tokens=32,
        overlap_schedule=seed % 4 < 3,
        new_token_ratio=0.02,
        transfer=IMPATIENT,
        handoff_retries=1,
    ) as rig:
        walk = Walk(rig, source, prompts, pauses=pauses)
        for _ in range(NUM_ACTIONS):
            walk.step()
        walk.end()
        for one in rig.asked:
            assert one.tokens == known.greedy(one.prompt, MAX_TOKENS)[: len(one.tokens)]
            if one.reason is FinishReason.LENGTH:
                assert len(one.tokens) == one.sampling.max_tokens
            elif one.reason is FinishReason.ABORT:
                assert one in walk.doomed
            else:
                # It timed out, or was rejected for lack of time.
                assert one in walk.hurried and one.ended.error_code in (4, 8), one.ended

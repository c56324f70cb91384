"""Random traffic for a runner, step by step: requests of every kind that start, decode, swap and
end.

It decides what a scheduler decides for a step, and does not know what the step computes.
"""

import random

import numpy as np

from common.requests.sampling import SamplingParams
from engine.batch.batch import PageCopies
from tests.support.engine.steps import Steps


def random_params(rng: random.Random) -> SamplingParams:
    """Return greedy or sampled parameters, with any filters, with or without penalties."""
    params: dict[str, float] = {"temperature": rng.choice((0.0, 0.0, 0.7, 1.3))}
    for name, values in (
        ("top_p", (1.0, 0.9)),
        ("top_k", (0, 20)),
        ("min_p", (0.0, 0.01)),
        ("repetition_penalty", (1.0, 1.0, 1.5)),
        ("frequency_penalty", (0.0, 0.0, 0.2)),
        ("presence_penalty", (0.0, 0.0, 2.0)),
    ):
        params[name] = rng.choice(values)
    return SamplingParams(max_tokens=9999, seed=rng.getrandbits(64), **params)  # type: ignore[arg-type]


class Traffic:
    """Random work that a scheduler could request of `steps` next.

    Args:
        drafts: give drafts to some rows. Nearly all of these are rejected.
    """

    def __init__(
        self, steps: Steps, seed: int, *, vocabulary_size: int, drafts: bool = False
    ) -> None:
        self._steps = steps
        self._rng = random.Random(seed)
        self._vocabulary_size = vocabulary_size
        self._waiting: dict[int, int] = {}  # tokens of the slot that are prefilled
        self._running: list[int] = []
        self._drafts = drafts

    def step(self) -> None:
        """Launch prompts, decode rows, or both. Requests may start and end before."""
        table, rng = self._steps.table, self._rng
        while table.num_free and rng.random() < 0.4:
            length = rng.choice((1, 2, 15, 16, 17, rng.randrange(1, 150)))
            tokens = [rng.randrange(self._vocabulary_size) for _ in range(length)]
            self._waiting[self._steps.add(tokens, random_params(rng))] = 0
        prompts = [slot for slot in self._waiting if rng.random() < 0.5]
        decodes = [slot for slot in self._running if rng.random() < 0.8]
        if prompts and (not decodes or rng.random() < 0.7):
            self._launch(prompts, decodes if rng.random() < 0.5 else [])
        elif decodes:
            self._launch([], decodes)
        if self._running and rng.random() < 0.2:
            self._end(rng.choice(self._running))
        for slot in [slot for slot in self._running if table.length[slot] > 200]:
            self._end(slot)

    def _launch(self, prompts: list[int], decodes: list[int]) -> None:
        table, rng = self._steps.table, self._rng
        rows, samples = [], []
        for slot in prompts:
            start, known = self._waiting[slot], int(table.known[slot])
            end = min(known, start + rng.choice((1, 16, 32, 1000)))
            rows.append((slot, start, end))
            samples.append(end == known)
            if end == known:
                del self._waiting[slot]
                self._running.append(slot)
            else:
                self._waiting[slot] = end
        for slot in decodes:
            length = int(table.length[slot])
            rows.append((slot, length - 1, length))
            samples.append(True)
        # The pages of a slot that is in no step may move at any time. Here they return at once.
        idle = [slot for slot in self._running if slot not in decodes and slot not in prompts]
        swap = self._copies(rng.choice(idle)) if idle and rng.random() < 0.2 else None
        if self._drafts and not prompts and rng.random() < 0.5:
            self._steps.launch(self._guessed(rows), swap_out=swap, swap_in=swap, verify=True)
            return
        only_decodes = None if not prompts else samples
        self._steps.launch(rows, samples=only_decodes, swap_out=swap, swap_in=swap)

    def _guessed(self, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the same rows, those with drafts first, with at most as many tokens as there
        are slots."""
        table, rng = self._steps.table, self._rng
        left, guessed = table.num_slots - len(rows), []
        for slot, start, end in rows:
            count = rng.randint(0, left)
            table.tokens[slot, end : end + count] = rng.randrange(self._vocabulary_size)
            left -= count
            guessed.append((slot, start, end + count))
        return sorted(guessed, key=lambda row: row[1] - row[2])

    def _copies(self, slot: int) -> PageCopies:
        pages = self._steps.table.pages_of(slot)
        return PageCopies(pages, np.arange(len(pages), dtype=np.int32))

    def _end(self, slot: int) -> None:
        self._steps.settle()
        self._running.remove(slot)
        self._steps.remove(slot)

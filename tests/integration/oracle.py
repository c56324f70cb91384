"""Greedy generation by transformers, which every cluster must reproduce, and clients that check
it."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from tests.support.models.checkpoints import confirmed_tokens, greedy_tokens, reference_model
from tests.support.processes.cluster import Cluster, wait_until


class Oracle:
    """One checkpoint in float32 on the CPU, one prompt at a time. Caches its responses."""

    def __init__(self, directory: Path) -> None:
        self._model = reference_model(directory)
        self._known: dict[tuple[int, ...], list[int]] = {}

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.config.vocab_size)

    def tokens(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the first `count` greedy tokens after `prompt`, with or without EOS."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            (known,) = greedy_tokens(self._model, [prompt], count)
            self._known[tuple(prompt)] = known
        return tuple(known[:count])

    def check(self, prompt: Sequence[int], tokens: Sequence[int], count: int) -> None:
        """Assert that `tokens` are the first `count` greedy tokens after `prompt`, with or
        without EOS."""
        assert len(tokens) == count
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = self._known[tuple(prompt)] = confirmed_tokens(self._model, prompt, tokens)
        assert list(tokens) == known[:count]


def random_prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(len(lengths))
    return [[source.randrange(3, 250) for _ in range(length)] for length in lengths]


class RightResponses:
    """Counts the right responses of clients."""

    def __init__(self) -> None:
        self.number = 0

    async def until_more(self, number: int) -> None:
        """Wait until the clients have had this number of further responses."""
        enough = self.number + number
        await wait_until(lambda: self.number >= enough, "clients have had more responses")


@asynccontextmanager
async def clients(
    cluster: Cluster,
    known: Oracle,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    num_clients: int = 4,
) -> AsyncIterator[RightResponses]:
    """Run clients that send these prompts in turn while inside the context. A wrong response, or
    an error, fails the test."""
    right, turns, over = RightResponses(), itertools.cycle(prompts), asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            prompt = next(turns)
            answer = await cluster.generate(prompt, max_tokens=num_tokens, ignore_eos=True)
            known.check(prompt, answer.token_ids, num_tokens)
            right.number += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(ask())
        try:
            yield right
        finally:
            over.set()


@cache
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)

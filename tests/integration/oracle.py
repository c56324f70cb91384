"""Greedy generation by transformers, which every cluster must reproduce."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.models.checkpoints import confirmed_tokens, greedy_tokens, reference_model


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


@cache
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)

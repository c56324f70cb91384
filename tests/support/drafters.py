"""Drafters that know what comes, do not, or know it now and then."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from engine.batch.batch import Ints
from engine.speculative.policy import AllDrafts
from engine.speculative.speculator import Speculator

Foretell = Callable[[list[int], int], list[int]]  # the next so many tokens after these
KINDS = ("right", "wrong", "random")


class Guesser:
    """Says what is foretold; of one token in so many (`wrong`) another one."""

    def __init__(self, foretell: Foretell, vocabulary_size: int, wrong: float, seed: int = 0):
        self._foretell = foretell
        self._vocabulary_size = vocabulary_size
        self._wrong = wrong
        self._random = random.Random(seed)

    def propose(self, tokens: Ints, count: int) -> Ints:
        guessed = np.array(self._foretell(tokens.tolist(), count), np.int32)
        others = [self._random.random() < self._wrong for _ in guessed]
        return np.where(others, (guessed + 1) % self._vocabulary_size, guessed).astype(np.int32)


def recall(answers: Sequence[Sequence[int]]) -> Foretell:
    """Foretell whole texts, prompts and responses. Returns no drafts for other texts."""

    def foretell(tokens: list[int], count: int) -> list[int]:
        for text in answers:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) : len(tokens) + count])
        return []

    return foretell


def speculator(
    kind: str, foretell: Foretell, vocabulary_size: int, max_drafts: int = 4, seed: int = 0
) -> Speculator:
    wrong = {"right": 0.0, "wrong": 1.0, "random": 0.3}[kind]
    drafter = Guesser(foretell, vocabulary_size, wrong, seed)
    return Speculator(drafter, AllDrafts(max_drafts), max_drafts)

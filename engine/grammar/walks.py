"""Walks through a grammar before a response uses it, which find the later cost of its tokens.

A walk drives a matcher along its own mask and never ends the response while anything else is
allowed. The cost of an ambiguous grammar grows with the number of readings of the text so far.
Different grammars have most readings for different texts, so the walks differ: random tokens,
random tokens of one byte, and one token repeated for as long as it is allowed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.grammar.bare import xgrammar
from engine.grammar.bits import WORD, allow, forbid, words_of
from engine.grammar.grammar_verifier import S_PER_TOKEN

NUM_TOKENS = 256  # of each walk
WALKS_S = 4.0  # CPU seconds for all walks, which bounds costs that do not grow
_WINDOW = 8  # tokens whose mean cost counts, because a single one may be costly
_GROWN_S = 1e-3  # growth below this cost is ignored
_GROWTH = 2.5  # cost ratio when the text doubles: more than linear

_Bits = NDArray[np.int32]
_Choice = Callable[[_Bits, int, np.random.Generator], int]


class TooDear(Exception):
    """A token takes more time than a response may spend, or will in a longer response."""


class Walks:
    """Walks over one vocabulary."""

    def __init__(self, words: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._num_words = words_of(len(words))
        self._single = np.zeros(self._num_words, np.int32)
        for token, word in enumerate(words):
            if len(word) == 1:
                allow(self._single, token)
        self._going_on = np.full(self._num_words, -1, np.int32)
        for token in eos_token_ids:
            if token < len(words):
                forbid(self._going_on, token)

    def check(self, grammar: Any) -> None:
        """Walk through the grammar. Raises TooDear. Must run on one thread of a process that does
        nothing else.

        Args:
            grammar: xgrammar.CompiledGrammar.
        """
        until_s = time.process_time() + WALKS_S
        for number, choose in enumerate((self._short, self._again, self._any, self._any)):
            self._walk(grammar, number, choose, until_s)

    def _walk(self, grammar: Any, seed: int, choose: _Choice, until_s: float) -> None:
        random = np.random.default_rng(seed)
        matcher = xgrammar.GrammarMatcher(grammar)
        bits = np.empty((1, self._num_words), np.int32)
        costs_s: list[float] = []
        token = -1
        for _ in range(NUM_TOKENS):
            began_s = time.process_time()
            if token >= 0:
                matcher.accept_token(token)
            if matcher.is_terminated():
                return
            bits[:] = -1
            matcher.fill_next_token_bitmask(bits, 0)
            now_s = time.process_time()
            costs_s.append(now_s - began_s)
            if sum(costs_s[-_WINDOW:]) > _WINDOW * S_PER_TOKEN:
                raise TooDear
            if len(costs_s) == NUM_TOKENS and _grows(costs_s):
                raise TooDear
            allowed = bits[0] & self._going_on
            if now_s > until_s or not allowed.any():
                return
            token = choose(allowed, token, random)

    def _any(self, allowed: _Bits, last: int, random: np.random.Generator) -> int:
        words = np.flatnonzero(allowed)
        word = int(words[random.integers(len(words))])
        places = np.flatnonzero(
            np.unpackbits(allowed[word : word + 1].view(np.uint8), bitorder="little")
        )
        return word * WORD + int(places[random.integers(len(places))])

    def _short(self, allowed: _Bits, last: int, random: np.random.Generator) -> int:
        single = allowed & self._single
        return self._any(single if single.any() else allowed, last, random)

    def _again(self, allowed: _Bits, last: int, random: np.random.Generator) -> int:
        if last >= 0 and int(allowed.view(np.uint32)[last // WORD]) >> (last % WORD) & 1:
            return last
        return self._short(allowed, last, random)


def _grows(costs_s: Sequence[float]) -> bool:
    """Return whether the cost of a token grows faster than the text, over two doublings of the
    text.

    Over one doubling alone the text may have reached a part of the grammar that costs more.
    """
    ends = (NUM_TOKENS // 4, NUM_TOKENS // 2, NUM_TOKENS)
    first, second, last = (statistics.median(costs_s[end // 2 : end]) for end in ends)
    grown = second > _GROWTH * first and last > _GROWTH * second
    return grown and last > _GROWN_S

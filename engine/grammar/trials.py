"""A process that verifies guides before the engine compiles them.

    python -m engine.grammar.trials DIRECTORY VOCABULARY EOS,EOS DESCRIPTOR...

The compilation of a grammar cannot be interrupted. A guide of a few characters can keep the
compiler busy for hours, use all memory or overflow its stack. Its matcher can do the same later, if
the text matches the grammar in many ways. Each guide is therefore prepared, compiled and tried in
its own process first. That process is forked from this one, which has loaded the vocabulary. The
kernel kills it at its limit of CPU time or memory. It returns the prepared guide or the reason for
the rejection. This process ends when its descriptors are closed.

Walks measure the later cost of a grammar's tokens. A walk feeds a matcher with tokens that its mask
allows, and does not end the response while anything else is allowed. The cost of an ambiguous
grammar grows with the number of parses of the text so far. Which texts have most parses depends on
the grammar. The walks therefore differ: random tokens, random tokens of one byte, and one token
repeated for as long as it is allowed.
"""

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest
from common.process import helper
from common.requests.sampling import GuidedDecoding
from engine.grammar.compilers import GrammarCompilers, prepared, xgrammar
from engine.grammar.grammar_verifier import S_PER_TOKEN, Verdict
from engine.grammar.matching import WORD, allow, forbid, words_of

NUM_TOKENS = 256  # tokens per walk
WALKS_S = 4.0  # CPU seconds for all walks, which limits costs that do not grow
_WINDOW = 8  # tokens over which the cost is averaged, because a single one may be costly
_GROWN_S = 1e-3  # growth of smaller costs is ignored
_GROWTH = 2.5  # cost ratio when the text doubles that means more than linear growth
_Bits = NDArray[np.int32]
_Choice = Callable[[_Bits, int, np.random.Generator], int]


class TooExpensive(Exception):
    """A token takes more time than a response may use, or will in a longer response."""


class Walks:
    """Walks over one vocabulary, to measure the cost of grammars."""

    def __init__(self, words: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._num_words = words_of(len(words))
        self._single = np.zeros(self._num_words, np.int32)
        for token, word in enumerate(words):
            if len(word) == 1:
                allow(self._single, token)
        self._going_on = np.full(self._num_words, -1, np.int32)
        # The last word of a mask has bits without a token, which xgrammar does not change.
        for token in (*eos_token_ids, *range(len(words), self._num_words * WORD)):
            if token < self._num_words * WORD:
                forbid(self._going_on, token)

    def check(self, grammar: Any) -> None:
        """Walk through the grammar. Raises TooExpensive.

        Costs are CPU time of this thread. The process clock under RLIMIT_CPU only advances with the
        kernel's ticks of some ms, so that most tokens would seem to cost nothing.

        Args:
            grammar: xgrammar.CompiledGrammar.
        """
        until_s = time.thread_time() + WALKS_S
        for number, choose in enumerate((self._short, self._again, self._any, self._any)):
            self._walk(grammar, number, choose, until_s)

    def _walk(self, grammar: Any, seed: int, choose: _Choice, until_s: float) -> None:
        random = np.random.default_rng(seed)
        matcher = xgrammar.GrammarMatcher(grammar)
        bits = np.empty((1, self._num_words), np.int32)
        costs_s: list[float] = []
        token = -1
        for _ in range(NUM_TOKENS):
            began_s = time.thread_time()
            if token >= 0:
                matcher.accept_token(token)
            if matcher.is_terminated():
                return
            bits[:] = -1
            matcher.fill_next_token_bitmask(bits, 0)
            now_s = time.thread_time()
            costs_s.append(now_s - began_s)
            if sum(costs_s[-_WINDOW:]) > _WINDOW * S_PER_TOKEN:
                raise TooExpensive
            if len(costs_s) == NUM_TOKENS and _grows(costs_s):
                raise TooExpensive
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

    One doubling is not enough: the text may have reached a more expensive part of the grammar.
    """
    ends = (NUM_TOKENS // 4, NUM_TOKENS // 2, NUM_TOKENS)
    first, second, last = (statistics.median(costs_s[end // 2 : end]) for end in ends)
    grown = second > _GROWTH * first and last > _GROWTH * second
    return grown and last > _GROWN_S


_SLACK_S = 2  # CPU seconds in addition to WALKS_S, for a call that the walks cannot interrupt


def main(directory: str, vocabulary: str, eos: str, *descriptors: str) -> None:
    eos_token_ids = [int(token) for token in eos.split(",") if token]
    compilers = GrammarCompilers.of_model(Path(directory), int(vocabulary), eos_token_ids)
    walks = Walks(compilers.words, eos_token_ids)

    def tried(content: bytes) -> bytes:
        guide = msgspec.msgpack.decode(content, type=GuidedDecoding)
        return msgspec.msgpack.encode(_verdict(compilers, walks, guide))

    helper.serve(descriptors, tried)


def _verdict(compilers: GrammarCompilers, walks: Walks, guide: GuidedDecoding) -> Verdict:
    """Verify the guide, in the process forked for it. Raises MemoryError."""
    try:
        form = prepared(guide)
        grammar = compilers.compiled(form)
    except InvalidRequest as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        return Verdict(refusal=str(error))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    until_s = min(math.ceil(time.process_time() + WALKS_S + _SLACK_S), most_s)
    resource.setrlimit(resource.RLIMIT_CPU, (until_s, until_s))
    try:
        walks.check(grammar)
    except TooExpensive:
        field, limit_ms = f"sampling.{guide.kind}", round(1e3 * S_PER_TOKEN)
        return Verdict(
            refusal=f"{field}: matching it takes more than {limit_ms} ms of CPU time for a token, "
            f"within {NUM_TOKENS} tokens: make it less ambiguous",
        )
    return Verdict(form)


if __name__ == "__main__":
    main(*sys.argv[1:])

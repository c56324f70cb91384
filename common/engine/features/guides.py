"""Guides on their way to grammars: compiled on a thread of its own, one after the other, and kept.

Knows nothing of slots and steps, and the engine thread never waits for it. xgrammar and the words
of the vocabulary are loaded with the first guide: nodes that never meet one pay nothing.

JSON has a vocabulary of its own, in which no word has a control character. xgrammar would let them
into texts, where JSON has no place for them, and between JSON's words a model could spend its
answer on line breaks and indentation: of white space there is one space at most.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from common.engine.features.allowed import words_of
from common.errors import InvalidRequest, Overloaded, cut
from common.logs import kv
from common.requests.guide import Guide
from common.requests.schemas import expressions
from common.requests.schemas.enforced import enforced
from common.spelling import Spelling

log = logging.getLogger(__name__)

MAX_KEPT = 128  # grammars
MAX_KEPT_BYTES = 256 << 20  # of what xgrammar itself keeps
MAX_WAITING = 64  # guides
MAX_WHITESPACE = 1  # spaces in a row between JSON's words
SLOW_S = 1.0  # to compile one: said in the log

_OBJECT = '{"type": "object"}'

Compiled = Any  # xgrammar.CompiledGrammar


class Guides:
    """Of one model. Engine thread only.

    Attributes:
        tell: called from another thread when a guide is done.
    """

    def __init__(self, directory: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = list(eos_token_ids)
        self._kept: OrderedDict[Guide, Future[Compiled]] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._compilers: _Compilers | None = None  # of the worker
        self.tell: Callable[[], None] = lambda: None

    def compiled(self, guide: Guide) -> "Future[Compiled]":
        """The grammar, or InvalidRequest that says what is wrong and where.

        Raises:
            Overloaded: too many others wait.
        """
        known = self._kept.get(guide)
        if known is not None:
            self._kept.move_to_end(guide)
            return known
        if sum(not each.done() for each in self._kept.values()) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} guides wait to be compiled already")
        made = self._kept[guide] = self._worker.submit(self._compile, guide)
        made.add_done_callback(lambda _: self.tell())
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(each for each, other in self._kept.items() if other.done())]
        return made

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    # The worker's --------------------------------------------------------------------------------

    def _compile(self, guide: Guide) -> Compiled:
        began = time.monotonic()
        try:
            self._compilers = self._compilers or self._make_compilers()
            made = self._compilers.compiled(guide)
            _check_begins(made)
        except Exception as error:
            raise InvalidRequest(f"sampling.{guide.kind}: {_reason(error)}") from error
        took_s = time.monotonic() - began
        if took_s > SLOW_S:
            log.warning("guide was slow to compile %s", kv(kind=guide.kind, seconds=took_s))
        return made

    def _make_compilers(self) -> "_Compilers":
        tokenizer = Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        spelling = Spelling(tokenizer, tuple(tokenizer.encode("a", add_special_tokens=False).ids))
        special = {
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        # What no text is made of has no bytes, and no grammar allows it.
        words = [
            b"" if token in special else spelling(token) for token in range(self._vocabulary_size)
        ]
        return _Compilers(words, self._eos_token_ids)


class _Compilers:
    """Of one vocabulary: for JSON, and for what is not."""

    def __init__(self, words: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        import xgrammar

        def compiler(words: Sequence[bytes]) -> Any:
            told = xgrammar.TokenizerInfo(
                list(words),
                xgrammar.VocabType.RAW,
                vocab_size=len(words),
                stop_token_ids=list(eos_token_ids),
            )
            return xgrammar.GrammarCompiler(
                told, max_threads=1, cache_limit_bytes=MAX_KEPT_BYTES // 2
            )

        self._of_text = compiler(words)
        self._of_json = compiler([b"" if min(word, default=0) < 0x20 else word for word in words])

    def compiled(self, guide: Guide) -> Compiled:
        match guide.kind:
            case "json_schema" | "json_object":
                schema = enforced(guide.text if guide.kind == "json_schema" else _OBJECT)
                return self._of_json.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            case "regex":
                expressions.check(guide.text)
                return self._of_text.compile_regex(guide.text)
            case _:
                return self._of_text.compile_grammar(guide.text)


def _check_begins(compiled: Compiled) -> None:
    """Raises InvalidRequest if no token can come first: then there is no answer."""
    import xgrammar

    bits = np.zeros((1, words_of(compiled.tokenizer_info.vocab_size)), np.int32)
    # False: there is nothing that may not come.
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits, 0) and not bits.any():
        raise InvalidRequest("no answer keeps to it")


def _reason(error: Exception) -> str:
    """xgrammar's, without the time and the place in its own source."""
    text = str(error).strip()
    _, found, rest = text.partition(": ")
    return cut(rest if found and text.startswith("[") else text)

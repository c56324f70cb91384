"""Compilation of guides (JSON schemas, regexes, grammars, structural tags) by xgrammar.

Callers limit time and memory. `prepared` rewrites a guide into a text that xgrammar enforces
completely. Its time depends on the guide, so it runs only in the verifier's process, and the engine
compiles the result.

JSON uses its own vocabulary, without words that have a control character, because xgrammar would
allow these inside strings. White space between JSON tokens is limited to one space. Otherwise a
model could spend its response on line breaks and indentation.

Guides that name tokens also use their own vocabulary. xgrammar accepts no token without bytes, even
if a guide names it. Tokens that are not part of any text therefore get a byte that occurs in no
text. Token syntax in xgrammar's EBNF is rejected.

xgrammar imports torch and transformers, which takes seconds of CPU time and hundreds of MiB, for
functions that Baton does not use. Stand-ins replace them, unless they are already imported.
"""

import re
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from tokenizers import Tokenizer

from common.errors import InvalidRequest, cut
from common.requests.sampling import GuidedDecoding, Prepared
from common.spelling import TokenSpelling
from engine.grammar.matching import words_of
from engine.grammar.schemas import expressions
from engine.grammar.schemas.enforced import enforced
from engine.grammar.schemas.tags import MAX_WHITESPACE, enforced_tag

_UNUSED = ("torch", "transformers")


class _StandIn(ModuleType):
    """A stand-in module that has an instantiable class under any name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made


def _imported() -> ModuleType:
    absent = [name for name in _UNUSED if name not in sys.modules]
    if "torch" in absent:
        sys.modules["torch"] = None  # type: ignore[assignment]
        import_module("tvm_ffi")  # works without torch if there is none
    for name in absent:
        sys.modules[name] = _StandIn(name)
    try:
        return import_module("xgrammar")
    finally:
        for name in absent:
            del sys.modules[name]


if TYPE_CHECKING:
    import xgrammar as xgrammar
else:
    xgrammar = _imported()
MAX_KEPT_BYTES = 256 << 20  # limit of xgrammar's own cache
MAX_GRAMMAR_BYTES = 64 << 20  # limit of one grammar, which several nodes cache
MAX_PREPARED_CHARACTERS = 4 << 20  # a schema may refer to a part of itself many times
Compiled = Any  # xgrammar.CompiledGrammar
_NO_TEXT = b"\xff"  # cannot be text or a part of text
_OBJECT = '{"type": "object"}'
# Patterns for a grammar as xgrammar prints it: string literals and character classes, and words
# with arguments.
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_WORD = re.compile(r"\b([A-Za-z]+)\(")
_REFUSED = frozenset(
    {"Token", "ExcludeToken", "TokenTagDispatch"}
)  # see GrammarCompilers._with_tokens
_REFUSED_BESIDE_TOKENS = _REFUSED | {"TagDispatch"}  # its free text would allow any token


class GrammarCompilers:
    """The compilers of one vocabulary: for JSON, for other text, and for guides that name
    tokens."""

    def __init__(self, words: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self.words = words
        self._eos_token_ids = list(eos_token_ids)
        self._of_text = self._compiler(words)
        self._of_json = self._compiler(
            [b"" if min(word, default=0) < 0x20 else word for word in words]
        )
        # No cache: xgrammar's rule cache ignores the token names of a rule and would return the
        # mask of another rule.
        self._with_tokens = self._compiler([word or _NO_TEXT for word in words], keeps=False)

    @classmethod
    def of_model(cls, directory: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> Self:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        spelling = TokenSpelling(
            tokenizer, tuple(tokenizer.encode("a", add_special_tokens=False).ids)
        )
        special = {
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        # Special tokens get no bytes, so that a grammar allows them only by name.
        words = [b"" if token in special else spelling(token) for token in range(vocabulary_size)]
        return cls(words, eos_token_ids)

    def compiled(self, form: Prepared) -> Compiled:
        """Compile a guide.

        Raises:
            InvalidRequest: the guide is invalid. The error says why and where.
        """
        with _refusing(form.kind):
            made = self._compiled(form)
            _check_begins(made)
            _check_size(made)
        return made

    def _compiled(self, form: Prepared) -> Compiled:
        match form.kind:
            case "json_schema" | "json_object":
                return self._of_json.compile_json_schema(
                    form.text, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "regex":
                return self._of_text.compile_regex(form.text)
            case "structural_tag":
                compiler = self._with_tokens if form.has_tokens else self._of_text
                return compiler.compile_structural_tag(form.text)
            case _:
                return self._of_text.compile_grammar(form.text)

    def _compiler(self, words: Sequence[bytes], *, keeps: bool = True) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            list(words),
            xgrammar.VocabType.RAW,
            vocab_size=len(words),
            stop_token_ids=self._eos_token_ids,
        )
        limit = MAX_KEPT_BYTES // 2
        return xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=keeps, cache_limit_bytes=limit
        )


def prepared(guide: GuidedDecoding) -> Prepared:
    """Rewrite a guide into a text that xgrammar enforces completely.

    Raises:
        InvalidRequest: the guide is invalid. The error says why and where.
    """
    with _refusing(guide.kind):
        form = _prepared(guide)
        if len(form.text) > MAX_PREPARED_CHARACTERS:
            raise InvalidRequest(
                f"expanded, it has {len(form.text)} characters, {MAX_PREPARED_CHARACTERS} allowed"
            )
    return form


def _prepared(guide: GuidedDecoding) -> Prepared:
    match guide.kind:
        case "json_schema" | "json_object":
            text = enforced(guide.text if guide.kind == "json_schema" else _OBJECT)
            return Prepared(guide.kind, text)
        case "regex":
            expressions.check(guide.text)
        case "structural_tag":
            tag = enforced_tag(guide.text)
            for grammar in tag.grammars:
                _check_words(grammar, _REFUSED_BESIDE_TOKENS if tag.has_tokens else _REFUSED)
            return Prepared(guide.kind, tag.text, tag.has_tokens)
        case _:
            _check_words(guide.text, _REFUSED)
    return Prepared(guide.kind, guide.text)


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Convert every error except MemoryError to an InvalidRequest that names the field."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidRequest(f"sampling.{kind}: {_reason(error)}") from error


def _check_words(ebnf: str, refused: Set[str]) -> None:
    """Raise InvalidRequest if the grammar contains a refused word, and RuntimeError if it is
    invalid."""
    words = _WORD.findall(_LITERAL.sub("", str(xgrammar.Grammar.from_ebnf(ebnf))))
    if found := refused & {*words}:
        raise InvalidRequest(
            f"{min(found)} is not supported in a grammar: use token formats of a structural tag"
        )


def _check_begins(compiled: Compiled) -> None:
    """Raise InvalidRequest if no token may come first, because then no response is possible."""
    bits = np.zeros((1, words_of(compiled.tokenizer_info.vocab_size)), np.int32)
    # False means that every token is allowed.
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits, 0) and not bits.any():
        raise InvalidRequest("no response can match it")


def _check_size(compiled: Compiled) -> None:
    size = compiled.memory_size_bytes
    if size > MAX_GRAMMAR_BYTES:
        limit = MAX_GRAMMAR_BYTES >> 20
        raise InvalidRequest(f"its grammar needs {size >> 20} MiB, {limit} allowed")


def _reason(error: Exception) -> str:
    """Return xgrammar's message without the time and its source location."""
    text = str(error).strip()
    _, found, rest = text.partition(": ")
    return cut(rest if found and text.startswith("[") else text)

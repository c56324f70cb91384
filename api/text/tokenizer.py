"""Text to token ids and back, by the `tokenizers` library alone.

A short text takes less time than to wake a thread, and is encoded where it is called. Longer ones
release the GIL on the library's threads, and wait for a core by length: whoever sends a long text
holds up nobody with a shorter one.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from api.text.by_length import ByLength
from common.errors import ConfigError
from common.spelling import Spelling

R = TypeVar("R")

_SHORT = 1024  # characters: a quarter of a millisecond
_SHORT_TOKENS = 1024  # to decode: likewise
_LONG_BYTES = 32 << 10  # of 30 ms and more
_PIECE = 64 << 10  # characters of a long text whose tokens are counted at once: 70 ms, 10 MB
_CUT_TOKENS = 64  # more, at most, that a piece has for having been cut out
_MAX_WAITING_BYTES = 32 << 20
# No tokenizer's longest token is shorter but in tests, where a text of few tokens is no burden.
_LEAST_LONGEST_TOKEN_BYTES = 16


class RouterTokenizer:
    """The model's fast tokenizer. For one event loop."""

    def __init__(self, tokenizer_json: bytes, cores: int | None = None) -> None:
        """
        Args:
            cores: encoders of texts that are not short; None: as this process may run on.
        Raises:
            ConfigError: this is no tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except ValueError as error:
            raise ConfigError(f"model: tokenizer.json cannot be used: {error}") from error
        # A tokenizer saved by a training script may cut or pad what it is given.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.hash = hashlib.sha256(tokenizer_json).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self._spelt = {number: token.content for number, token in added.items() if token.special}
        self._special = {text: number for number, text in self._spelt.items()}
        self.some_text = tuple(self._tokenizer.encode("a", add_special_tokens=False).ids)
        self.spelling = Spelling(self._tokenizer, self.some_text)
        self.longest_token_bytes = _longest_token_bytes(self._tokenizer)
        cores = cores or len(os.sched_getaffinity(0))
        # Two queues: long ones may not have all cores, since none of them can be interrupted.
        self._brief = ByLength(cores, max_waiting_bytes=_MAX_WAITING_BYTES)
        self._long = ByLength(max(1, cores - 1), max_waiting_bytes=_MAX_WAITING_BYTES)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: True for plain text, False for a rendered chat template.
        Raises:
            Overloaded: too much text waits already.
        """
        return await self._ids(text, text, add_special_tokens=add_special_tokens)

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each of some short texts, without special tokens. Raises as `encode`."""
        total_bytes = sum(map(num_bytes, texts))
        if total_bytes <= _SHORT:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        else:
            encodings = await self._run(
                total_bytes,
                time.monotonic(),
                lambda: self._tokenizer.async_encode_batch_fast(texts, add_special_tokens=False),
            )
        return [encoding.ids for encoding in encodings]

    async def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts as one, as the tokenizer joins pairs. Raises as `encode`."""
        return await self._ids((first, second), first + second, add_special_tokens=True)

    async def _ids(
        self, wanted: str | tuple[str, str], text: str, *, add_special_tokens: bool
    ) -> list[int]:
        """
        Args:
            text: all of it.
        """
        if len(text) <= _SHORT:
            # The fast form leaves out which characters each token comes from.
            short = self._tokenizer.encode_batch_fast(
                [wanted], add_special_tokens=add_special_tokens
            )
            ids: list[int] = short[0].ids
            return ids
        encoding = await self._encoding(
            wanted, num_bytes(text), time.monotonic(), add_special_tokens=add_special_tokens
        )
        ids = encoding.ids
        return ids

    async def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether `text` is found to have more tokens, at the cost of about as many, however long
        it is; if not, it may still have a few more.

        Encoded piece by piece it takes no more memory than a piece does. Where a word is cut there
        are a few tokens too many, which are not counted.
        Raises:
            Overloaded: too much text waits already.
        """
        if len(text) <= _PIECE:
            return False
        total, arrived = num_bytes(text), time.monotonic()
        counted = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            encoding = await self._encoding(piece, total, arrived, add_special_tokens=False)
            counted += max(0, len(encoding) - _CUT_TOKENS)
            if counted > num_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; ids the tokenizer does not know give none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def special(self, texts: Iterable[str]) -> Mapping[str, int]:
        """Of those that are special tokens, the ids."""
        return {text: self._special[text] for text in texts if text in self._special}

    def spelt(self, special: Iterable[int]) -> Mapping[int, str]:
        """Of such tokens, the texts."""
        return {token: self._spelt[token] for token in special}

    async def decode_any(self, token_ids: list[int]) -> str:
        """As `decode`, for any number of them.

        Raises:
            Overloaded: too much text waits already.
        """
        if len(token_ids) <= _SHORT_TOKENS:
            return self.decode(token_ids)
        texts: list[str] = await self._run(
            4 * len(token_ids),
            time.monotonic(),
            lambda: self._tokenizer.async_decode_batch([token_ids], skip_special_tokens=True),
        )
        return texts[0]

    def token_of(self, name: str) -> int | None:
        """The one that the vocabulary spells so; None: there is none."""
        token: int | None = self._tokenizer.token_to_id(name)
        return token

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary spells each; "" of what it does not have."""
        return [self._tokenizer.id_to_token(token) or "" for token in token_ids]

    async def _encoding(
        self,
        text: str | tuple[str, str],
        total_bytes: int,
        arrived: float,
        *,
        add_special_tokens: bool,
    ) -> Encoding:
        # The batch form releases the GIL; `encode` would hold it, 2 ms per thousand tokens.
        encodings: list[Encoding] = await self._run(
            total_bytes,
            arrived,
            lambda: self._tokenizer.async_encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            ),
        )
        return encodings[0]

    async def _run(
        self, total_bytes: int, arrived: float, start: Callable[[], "asyncio.Future[R]"]
    ) -> R:
        queue = self._long if total_bytes > _LONG_BYTES else self._brief
        await queue.take(total_bytes, arrived)
        running = start()
        # A caller that gives up does not stop the library's thread: its core stays taken.
        running.add_done_callback(lambda _: queue.give_back())
        return await asyncio.shield(running)


def num_bytes(text: str) -> int:
    """Of `text` as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Of the text that one token can stand for."""
    # Of a byte-level vocabulary each character of a token's name stands for a byte.
    length = len if "ByteLevel" in repr(tokenizer.decoder) else num_bytes
    learned = (length(name) for name in tokenizer.get_vocab(with_added_tokens=False))
    added = (num_bytes(token.content) for token in tokenizer.get_added_tokens_decoder().values())
    return max(chain([_LEAST_LONGEST_TOKEN_BYTES], learned, added))

"""Tokenization with the `tokenizers` library, and incremental detokenization of responses.

A short text takes less time than waking a thread, so its caller encodes it. Longer texts run on the
library's threads without the GIL. They wait for a core, short texts first, so that long ones do not
delay others.
"""

import asyncio
import hashlib
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from common.errors import ConfigError, Overloaded
from common.spelling import TokenSpelling

_GAINED_BYTES_PER_S = 256 << 10

_Waiting = tuple[float, int, asyncio.Future[None]]


# The shortest text is next, but no text waits forever: each second of waiting counts like a fixed
# number of bytes less. All waiting texts gain alike, so their order never changes.
class LengthBatcher:
    """Queue of texts to tokenize, for a limited number of concurrent texts. For one event loop."""

    def __init__(self, places: int, *, max_waiting_bytes: int) -> None:
        self._free = places
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = count()

    async def acquire(self, num_bytes: int, arrived: float) -> None:
        """Wait for a place, which the caller must `release`.

        Cancelling removes the text from the queue.

        Args:
            num_bytes: size of the text.
            arrived: arrival time of the text in seconds, on any clock that all callers share.

        Raises:
            Overloaded: immediately, if too much text is waiting.
        """
        if self._free:
            self._free -= 1
            return
        if self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise Overloaded(
                f"{self._num_waiting_bytes} bytes of text wait to be tokenized, "
                f"{self._max_waiting_bytes} allowed"
            )
        rank = arrived * _GAINED_BYTES_PER_S + num_bytes
        turn = asyncio.get_running_loop().create_future()
        waiting = (rank, next(self._numbers), turn)
        heapq.heappush(self._waiting, waiting)
        self._num_waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            self._num_waiting_bytes -= num_bytes

    def release(self) -> None:
        """Give the place to the next text."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # it may have been cancelled just now
                turn.set_result(None)
                return
        self._free += 1

    def _leave(self, waiting: _Waiting) -> None:
        *_, turn = waiting
        if not turn.cancelled():
            self.release()  # it got its place at the moment of its cancellation
        elif waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)


R = TypeVar("R")

_SHORT = 1024  # characters: takes a quarter of a millisecond
_SHORT_TOKENS = 1024  # tokens to decode: also takes a quarter of a millisecond
_LONG_BYTES = 32 << 10  # texts that take 30 ms and more
_PIECE = 64 << 10  # characters of a long text to encode at once: 70 ms, 10 MB
_CUT_TOKENS = 64  # largest number of tokens that a cut can add to a piece
_MAX_WAITING_BYTES = 32 << 20
# All real tokenizers have a longer token. In tests, a text of few tokens costs little.
_LEAST_LONGEST_TOKEN_BYTES = 16


class RouterTokenizer:
    """The model's tokenizer. For one event loop.

    Args:
        cores: number of concurrent encoders of longer texts. None: the cores of this process.

    Raises:
        ConfigError: the file is not a tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, cores: int | None = None) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except ValueError as error:
            raise ConfigError(f"model: tokenizer.json cannot be used: {error}") from error
        # A tokenizer saved by a training script may truncate or pad its input.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.hash = hashlib.sha256(tokenizer_json).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self._spelt = {number: token.content for number, token in added.items() if token.special}
        self._special = {text: number for number, text in self._spelt.items()}
        self.some_text = tuple(self._tokenizer.encode("a", add_special_tokens=False).ids)
        self.spelling = TokenSpelling(self._tokenizer, self.some_text)
        self.longest_token_bytes = _longest_token_bytes(self._tokenizer)
        cores = cores or len(os.sched_getaffinity(0))
        # Two queues: the encoding of long texts cannot be interrupted, so they must not occupy all
        # cores.
        self._brief = LengthBatcher(cores, max_waiting_bytes=_MAX_WAITING_BYTES)
        self._long = LengthBatcher(max(1, cores - 1), max_waiting_bytes=_MAX_WAITING_BYTES)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special_tokens: True for plain text, False for a rendered chat template.

        Raises:
            Overloaded: too much text waits already.
        """
        return (await self._batch([text], text, add_special_tokens=add_special_tokens))[0]

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of some short texts, without special tokens.

        Raises as `encode` does.
        """
        return await self._batch(texts, "".join(texts), add_special_tokens=False)

    async def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, joined as a pair. Raises as `encode` does."""
        return (await self._batch([(first, second)], first + second, add_special_tokens=True))[0]

    async def _batch(
        self,
        inputs: Sequence[str | tuple[str, str]],
        text: str,
        *,
        add_special_tokens: bool,
    ) -> list[list[int]]:
        """Return the token ids of texts or pairs. `text` is all of them, for its length."""
        if len(text) <= _SHORT:
            # The fast form omits the character offsets of tokens.
            found = self._tokenizer.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        else:
            size, now = num_bytes(text), time.monotonic()
            found = await self._encodings(inputs, size, now, add_special_tokens=add_special_tokens)
        return [each.ids for each in found]

    async def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Return True if `text` certainly has more tokens. If False, it may still have a few more.

        Costs about as much as `num_tokens` tokens, however long the text is. The text is encoded in
        pieces, which limits memory. Cuts within words add a few tokens, which do not count.

        Raises:
            Overloaded: too much text is waiting.
        """
        if len(text) <= _PIECE:
            return False
        total, arrived = num_bytes(text), time.monotonic()
        counted = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            (encoding,) = await self._encodings([piece], total, arrived, add_special_tokens=False)
            counted += max(0, len(encoding) - _CUT_TOKENS)
            if counted > num_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text without special tokens. Unknown ids have no text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def special(self, texts: Iterable[str]) -> Mapping[str, int]:
        """Return the ids of the texts that are special tokens."""
        return {text: self._special[text] for text in texts if text in self._special}

    def spelt(self, special: Iterable[int]) -> Mapping[int, str]:
        """Return the texts of special tokens."""
        return {token: self._spelt[token] for token in special}

    async def decode_any(self, token_ids: list[int]) -> str:
        """Return text as `decode` does, for any number of tokens.

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
        """Return the token with this name in the vocabulary, None if there is none."""
        token: int | None = self._tokenizer.token_to_id(name)
        return token

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the names of tokens in the vocabulary, "" for unknown ids."""
        return [self._tokenizer.id_to_token(token) or "" for token in token_ids]

    async def _encodings(
        self,
        inputs: Sequence[str | tuple[str, str]],
        total_bytes: int,
        arrived: float,
        *,
        add_special_tokens: bool,
    ) -> list[Encoding]:
        # The batch form releases the GIL. `encode` would hold it for 2 ms per thousand tokens.
        return await self._run(
            total_bytes,
            arrived,
            lambda: self._tokenizer.async_encode_batch_fast(
                inputs, add_special_tokens=add_special_tokens
            ),
        )

    async def _run(
        self, total_bytes: int, arrived: float, start: Callable[[], "asyncio.Future[R]"]
    ) -> R:
        queue = self._long if total_bytes > _LONG_BYTES else self._brief
        await queue.acquire(total_bytes, arrived)
        running = start()
        # Cancelling the caller does not stop the library's thread, so its core stays in use.
        running.add_done_callback(lambda _: queue.release())
        return await asyncio.shield(running)


def num_bytes(text: str) -> int:
    """Return the size of `text` as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Return the length of the longest text that one token can stand for, in bytes."""
    # In a byte-level vocabulary, each character of a token's name stands for a byte.
    length = len if "ByteLevel" in repr(tokenizer.decoder) else num_bytes
    learned = (length(name) for name in tokenizer.get_vocab(with_added_tokens=False))
    added = (num_bytes(token.content) for token in tokenizer.get_added_tokens_decoder().values())
    return max(chain([_LEAST_LONGEST_TOKEN_BYTES], learned, added))


_BROKEN = "\ufffd"  # decoded from bytes that are not a character, or not yet
_SLIDE_TOKENS = 16  # a longer window of complete text slides: decoding it costs as much as a slide
_MAX_WINDOW = 48
_HARD_WINDOW = 256  # limit of the window if tokens have no text
_MAX_PENDING = 3  # bytes of an incomplete character


class Detokenizer:
    """The text of one request's generated tokens, without incomplete characters.

    For each new token only the last few tokens are decoded again. This window starts where the text
    was complete, so it contains everything that joins tokens (UTF-8 bytes, leading spaces).
    Special tokens that are marks are returned as text. Only their positions in `marks` distinguish
    them from the same text in other tokens.

    All `push`es and one `flush` together return the text that `decode` returns for `context` and
    all tokens at once, however they were split.

    Attributes:
        marks: positions in the text at which a mark begins, in order. Readers remove them.

    Args:
        context: tokens of complete text before the first token. Without it, a decoder that drops a
            space at the start of a text would drop it at the start of a response.
        spelt: text of the tokens that are marks. Marks are never decoded.
    """

    def __init__(
        self,
        decoder: RouterTokenizer,
        context: Sequence[int] = (),
        spelt: Mapping[int, str] | None = None,
    ) -> None:
        self._decoder = decoder
        self._context = context
        self._spelt = spelt or {}
        self.marks: deque[int] = deque()
        self._length = 0  # characters of all returned text
        self._begin()

    def _begin(self) -> None:
        self._window = list(self._context)
        self._clean = len(self._context)  # window[:clean] is complete text
        self._num_returned = len(
            self._decoder.decode(self._context)
        )  # its characters that were returned
        self._settled = True  # True: all of them were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add and that no later token can change."""
        new, begin = "", 0
        for end, token in enumerate(token_ids) if self._spelt else ():
            if (mark := self._spelt.get(token)) is not None:
                new += self._push(token_ids[begin:end]) + self.flush()
                self.marks.append(self._length + len(new))
                new += mark
                self._begin()
                begin = end + 1
        new += self._push(token_ids[begin:])
        self._length += len(new)
        return new

    def _push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decoder.decode(self._window)
        settled = text.rstrip(_BROKEN)
        new = settled[self._num_returned :]
        self._num_returned = max(self._num_returned, len(settled))
        self._settled = settled == text
        if self._settled:
            if len(self._window) > _SLIDE_TOKENS:
                self._slide(text)
            self._clean = len(self._window)
        elif len(self._window) > _MAX_WINDOW:
            new += self._cut(text)
        return new

    def flush(self) -> str:
        """Return the rest after the last token: bytes that never became a character."""
        return "" if self._settled else self._decoder.decode(self._window)[self._num_returned :]

    def _slide(self, text: str) -> None:
        """Move the window to the previous complete point, if decoding from there agrees."""
        later = self._window[self._clean :]
        later_text = self._decoder.decode(later)
        if (later_text and text.endswith(later_text)) or len(self._window) > _MAX_WINDOW:
            self._window = later
            self._num_returned = len(later_text)

    def _cut(self, text: str) -> str:
        """Drop the older tokens of a long run without valid text.

        Cuts between two characters, and before bytes that may still become one.
        """
        window = self._window
        pending = min(len(text) - len(text.rstrip(_BROKEN)), _MAX_PENDING)
        for end in range(len(window) - 1, 0, -1):
            before, after = self._decoder.decode(window[:end]), self._decoder.decode(window[end:])
            if len(after) >= pending and before + after == text:
                break
        else:
            if len(window) <= _HARD_WINDOW:
                return ""
            before, end = text, len(window)
        new = before[self._num_returned :]
        self._num_returned = max(0, self._num_returned - len(before))
        self._window = window[end:]
        self._clean = 0
        return new

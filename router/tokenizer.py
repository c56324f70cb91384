"""Text to token ids and back, by the `tokenizers` library alone.

Encoding a long text releases the GIL and runs on the library's threads. A short one, and any
decoding, takes less time than to wake a thread, and runs where it is called.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence

from tokenizers import Tokenizer

from common.errors import ConfigError

_SHORT = 1024  # characters: a quarter of a millisecond


class RouterTokenizer:
    """The model's fast tokenizer. For one event loop."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises ConfigError when this is no tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except ValueError as error:
            raise ConfigError(f"model: tokenizer.json cannot be used: {error}") from error
        # A tokenizer saved by a training script may cut or pad what it is given.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.hash = hashlib.sha256(tokenizer_json).hexdigest()
        self.some_text = tuple(self._tokenizer.encode("a", add_special_tokens=False).ids)
        self._encoders = asyncio.Semaphore(os.cpu_count() or 1)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. At most one encoding of a long text per core runs, others wait.

        Args:
            add_special_tokens: True for plain text, False for a rendered chat template.
        """
        if len(text) <= _SHORT:
            # The fast form leaves out which characters each token comes from.
            short = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = short[0].ids
            return ids
        await self._encoders.acquire()
        # The batch form releases the GIL; `encode` would hold it, 2 ms per thousand tokens.
        encoding = self._tokenizer.async_encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        # A caller that gives up does not stop the library's thread: its core stays taken.
        encoding.add_done_callback(lambda _: self._encoders.release())
        ids = (await asyncio.shield(encoding))[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; ids the tokenizer does not know give none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

"""The bytes of single tokens, including special ones, for log-probabilities.

A token can be a part of a character. Its bytes are returned anyway.
"""

import re
from collections.abc import Mapping

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpelling:
    """Bytes of a tokenizer's tokens. Caches its results, at most one per vocabulary entry."""

    def __init__(self, tokenizer: Tokenizer, context: tuple[int, ...]) -> None:
        """
        Args:
            context: tokens of complete text. After it, decoders keep a space that they would drop
                at the start of a text.
        """
        self._tokenizer = tokenizer
        self._context = list(context)
        self._lead = tokenizer.decode(self._context, skip_special_tokens=False)
        self._byte_level = _byte_level() if "ByteLevel" in repr(tokenizer.decoder) else None
        self._added = {
            number: token.content.encode()
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token. Empty if the tokenizer does not know it."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spelt(token)
        return known

    def _spelt(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level is not None and all(sign in self._byte_level for sign in name):
            return bytes(self._byte_level[sign] for sign in name)
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes.fromhex(byte[1])
        text = self._tokenizer.decode([*self._context, token], skip_special_tokens=False)
        return text.removeprefix(self._lead).encode()


def _byte_level() -> Mapping[str, int]:
    """Return the bytes for the characters that byte-level vocabularies (GPT-2) use for them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }

"""Incremental detokenisation that never returns an incomplete character.

For each new token only the last few tokens are decoded again: a window that starts where the text
was last complete, so that everything that joins tokens (UTF-8 bytes, leading spaces) is included.

Some special tokens are marks. They are returned as text, and are distinguishable from the same text
spelt with other tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

_BROKEN = "\ufffd"  # decoded from bytes that are not a character, or not yet
_MAX_WINDOW = 48
_HARD_WINDOW = 256  # limit of the window, if tokens have no text
_MAX_PENDING = 3  # bytes of an incomplete character


class TokenDecoder(Protocol):
    """Decoder of a whole sequence of token ids."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """The text of one request's generated tokens.

    All `push`es and one `flush` together return the text that `decode` returns for `context` and
    all tokens at once, however they were split.

    Attributes:
        marks: positions in that text at which a mark begins, in order. Readers remove them.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        context: Sequence[int] = (),
        spelt: Mapping[int, str] | None = None,
    ) -> None:
        """
        Args:
            context: tokens of complete text before the first token. A decoder that drops a space at
                the start of a text then keeps it at the start of a response.
            spelt: text of the tokens that are marks. Marks are never decoded.
        """
        self._decoder = decoder
        self._context = context
        self._spelt = spelt or {}
        self.marks: deque[int] = deque()
        self._length = 0  # of all returned text
        self._begin()

    def _begin(self) -> None:
        self._window = list(self._context)
        self._clean = len(self._context)  # window[:clean] is complete text
        self._told = len(self._decoder.decode(self._context))  # its characters that were returned
        self._settled = True  # all of them were returned

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
        new = settled[self._told :]
        self._told = max(self._told, len(settled))
        self._settled = settled == text
        if self._settled:
            self._slide(text)
        elif len(self._window) > _MAX_WINDOW:
            new += self._cut(text)
        return new

    def flush(self) -> str:
        """Return the rest after the last token: bytes that never became a character."""
        return "" if self._settled else self._decoder.decode(self._window)[self._told :]

    def _slide(self, text: str) -> None:
        """Move the start of the window to the previous complete point.

        Only if decoding from there agrees.
        """
        later = self._window[self._clean :]
        later_text = self._decoder.decode(later)
        if (later_text and text.endswith(later_text)) or len(self._window) > _MAX_WINDOW:
            self._window = later
            self._told = len(later_text)
        self._clean = len(self._window)

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
        new = before[self._told :]
        self._told = max(0, self._told - len(before))
        self._window = window[end:]
        self._clean = 0
        return new

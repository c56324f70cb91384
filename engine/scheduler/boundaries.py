"""Positions in a prompt at which a state is kept for later requests. Pure arithmetic.

A state is kept at the last page boundary from which the same prompt could continue if it comes
again: it matches all but its last token. Another one is kept where the prompt branches off a cached
one, since prompts with that common prefix are likely to come again. A chunk that would pass such a
branch ends there.
"""

from typing import NamedTuple


class ChunkRange(NamedTuple):
    """One forward of a prompt, which ends at `end`. Its state after token `keep` is kept; 0: none
    is."""

    end: int
    keep: int


def stretch(start: int, end: int, *, num_tokens: int, branch: int, page_size: int) -> ChunkRange:
    """Return where the next forward of a prompt ends and which state it keeps.

    Args:
        start, end: token indices that would be computed next.
        num_tokens: of the whole prompt.
        branch: page boundary at which the prompt branches off the cached one; 0: none.
    """
    last = last_boundary(num_tokens, page_size)
    if start < branch < last and branch <= end:
        return ChunkRange(branch, branch)
    return ChunkRange(end, last if start < last <= end else 0)


def last_boundary(num_tokens: int, page_size: int) -> int:
    """Return the last page boundary from which a repetition of the prompt can continue."""
    return (num_tokens - 1) // page_size * page_size

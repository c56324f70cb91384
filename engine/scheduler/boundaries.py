"""Where on its way through a prompt a state is kept for those that come later. Pure arithmetic.

At the last page's edge at which the same prompt, once more, could go on: it matches all but its
last token. And where the prompt parts from one that the cache has: those that begin like both come
again. A chunk that is on its way past such a branch ends there.
"""

from typing import NamedTuple


class Stretch(NamedTuple):
    """A forward of a prompt ends at `end`; after `keep` of its tokens the state is wanted, 0: it is
    nowhere."""

    end: int
    keep: int


def stretch(start: int, end: int, *, num_tokens: int, branch: int, page_size: int) -> Stretch:
    """
    Args:
        start, end: token indices of what would be computed next.
        num_tokens: of the whole prompt.
        branch: where the prompt parts from what is cached, a page's edge; 0: nowhere.
    """
    last = last_boundary(num_tokens, page_size)
    if start < branch < last and branch <= end:
        return Stretch(branch, branch)
    return Stretch(end, last if start < last <= end else 0)


def last_boundary(num_tokens: int, page_size: int) -> int:
    """From where the same prompt can be gone on from, once more."""
    return (num_tokens - 1) // page_size * page_size

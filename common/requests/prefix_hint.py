"""Hints about nodes that hold a prefix of a prompt.

A hint may be wrong. The receiver requests the prefix there and recomputes it if it is missing.
"""

import msgspec

MAX_HINTS = 4  # per request


class PrefixHint(msgspec.Struct, frozen=True):
    """A node by its address, and how many prompt tokens it holds, from the first one on."""

    address: str
    num_tokens: int

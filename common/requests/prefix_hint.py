"""Who holds the KV of how much of a prompt, as somebody believes. A hint: whoever follows it asks
there, and computes where it was wrong."""

import msgspec

MAX_HINTS = 4  # of one request


class PrefixAt(msgspec.Struct, frozen=True):
    """A node, by its address, has the KV of so many tokens from the first one on."""

    address: str
    num_tokens: int

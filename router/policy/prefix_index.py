"""Which nodes probably have which prefix in their caches.

A prefix is known by its name, which its namespace is part of: a prompt finds nothing of another's.
Told by two: the nodes' own events, which are exact and a moment late, and this router's history of
what it has placed, which is neither. Of a node that tells, the history only bridges the moment
between placing a prompt and hearing that it is stored; of one that does not, it is all there is.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from xxhash import xxh3_64_intdigest

from common.errors import ProtocolViolation
from common.requests.namespace import SHARED, Namespace
from common.requests.prefix_hash import BYTES_PER_TOKEN, PrefixHasher, as_bytes

MAX_PAGES = 1 << 18  # taken of one node's events; 4 Mi tokens in pages of 16, some 25 MB
MAX_PAGE_SIZE = 1 << 12  # tokens
# History knows prefixes whose length is a multiple of this many tokens.
STRIDE = 128
MAX_HISTORY = 1 << 15  # prefixes of one node: 4 Mi tokens
HISTORY_S = 10.0  # how long history of a node that tells is believed, at least


class PromptPrefixes:
    """The names of one prompt's prefixes, made when they are wanted."""

    __slots__ = ("_begin", "_bytes", "_names", "_strides", "num_tokens")

    def __init__(self, token_ids: Sequence[int], namespace: Namespace = SHARED) -> None:
        self.num_tokens = len(token_ids)
        self._begin = len(namespace)  # of the tokens
        self._bytes = memoryview(namespace + as_bytes(token_ids))
        self._names: dict[int, int] = {}
        self._strides: list[int] | None = None

    def name(self, num_tokens: int) -> int:
        """Of the first `num_tokens`."""
        name = self._names.get(num_tokens)
        if name is None:
            prefix = self._bytes[: self._begin + num_tokens * BYTES_PER_TOKEN]
            name = self._names[num_tokens] = xxh3_64_intdigest(prefix)
        return name

    @property
    def strides(self) -> list[int]:
        """Of every whole number of strides, the shortest first."""
        if self._strides is None:
            hasher = PrefixHasher(self._bytes[: self._begin])
            self._strides = hasher.extend(self._bytes[self._begin :], STRIDE)
        return self._strides


class PrefixIndex:
    """For one event loop. Bounded for each node; nodes are those that the caller names.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[str, _Node] = {}

    def cached_tokens(self, prompt: PromptPrefixes, address: str) -> int:
        """How much of the prompt the node has; 0 of a node that nothing is known of."""
        node = self._nodes.get(address)
        return node.match(prompt) if node else 0

    def telling(self) -> set[str]:
        """Nodes that have told of something."""
        return {address for address, node in self._nodes.items() if node.told}

    def told_tokens(self, prompt: PromptPrefixes, address: str) -> int:
        """How much of the prompt the node has by its own words."""
        node = self._nodes.get(address)
        return node.match_told(prompt) if node else 0

    def placed(self, prompt: PromptPrefixes, address: str) -> None:
        """The node is about to compute the prompt."""
        self._node(address).remember(prompt.strides, self._clock())

    def changed(
        self,
        address: str,
        page_size: int,
        *,
        cleared: bool,
        stored: Iterable[int] = (),
        removed: Iterable[int] = (),
    ) -> None:
        """The node has told what it has, by the names of the prefixes that its pages end.

        Args:
            page_size: tokens.
            cleared: what it told before is void.
            removed: what has gone since.
            stored: what has come since. What exceeds MAX_PAGES is left out.
        Raises:
            ProtocolViolation: no page has that size.
        """
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ProtocolViolation(f"its pages have {page_size} tokens")
        node = self._node(address)
        if cleared or node.page_size != page_size:
            node.clear()
            node.page_size = page_size
        node.change(stored, removed)

    def silent(self, address: str) -> None:
        """The node tells nothing any more: what it has told may be wrong from now on."""
        if address in self._nodes:
            self._nodes[address].untell()

    def forget(self, address: str) -> None:
        """The node has gone."""
        self._nodes.pop(address, None)

    def num_pages(self, address: str) -> int:
        """Pages that the node has told of."""
        return len(self._nodes[address].told) if address in self._nodes else 0

    def _node(self, address: str) -> "_Node":
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = _Node()
        return node


class _Node:
    """One node's prefixes. A node that has a prefix has all that are shorter."""

    def __init__(self) -> None:
        self.page_size = 1
        self.told: set[int] = set()
        self._tells = False
        # History in two generations: forgetting the older one costs nothing a prefix.
        self._recent: dict[int, None] = {}
        self._older: dict[int, None] = {}
        self._since = 0.0  # clock at which `_recent` began

    def match(self, prompt: PromptPrefixes) -> int:
        """Tokens of the longest prefix that it has."""
        told = self.match_told(prompt)
        # From where history could say more.
        strides = prompt.strides[told // STRIDE :] if self._recent or self._older else ()
        known = told // STRIDE
        for name in strides:
            if name not in self._recent and name not in self._older:
                break
            known += 1
        return max(told, known * STRIDE)

    def remember(self, strides: list[int], now: float) -> None:
        limit = MAX_HISTORY // 2
        aged = self._tells and now - self._since > HISTORY_S
        if aged or len(self._recent) + len(strides) > limit:
            self._older, self._recent, self._since = self._recent, {}, now
        self._recent.update(dict.fromkeys(strides[:limit]))

    def change(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        self._tells = True
        gone = list(removed)
        self.told.difference_update(gone)
        for name in gone:
            self._recent.pop(name, None)
            self._older.pop(name, None)
        self.told.update(islice(stored, MAX_PAGES - len(self.told)))

    def clear(self) -> None:
        self.told.clear()
        self._recent.clear()
        self._older.clear()

    def untell(self) -> None:
        self.told.clear()
        self._tells = False

    def match_told(self, prompt: PromptPrefixes) -> int:
        """O(log(pages)); most prompts that are not cached differ in the first page."""
        if not self.told:
            return 0
        told, size = self.told, self.page_size
        low, high = 0, prompt.num_tokens // size
        middle = 0
        while low < high:
            if prompt.name((middle + 1) * size) in told:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low * size

"""Requests to forget KV that gave NaN logits: their receivers, and the rate that a node accepts."""

import numpy as np
import pytest

from common.page_tables import PageTables
from engine.scheduler.slot_owners import CorruptPrefix
from kvtransfer.messages import InvalidatePrefix
from kvtransfer.ports import InvalidateCommand
from node.sharing.prefixes import INVALIDATION_INTERVAL_S, MAX_INVALIDATIONS, CorruptPrefixes
from tests.kvtransfer.search.sides.hand_off import PAGE_SIZE
from tests.kvtransfer.search.sides.prefix import Memory, Posts

NUM_PAGES = 3
TOKENS = np.arange(NUM_PAGES * PAGE_SIZE, dtype=np.int32)
OTHERS = b"o" * 16


@pytest.fixture
def memory() -> Memory:
    return Memory(8 * NUM_PAGES, PageTables(PAGE_SIZE))


def num_cached(memory: Memory, namespace: bytes) -> int:
    return memory.cache.match(TOKENS, namespace).num_tokens


def test_every_source_of_the_prefix_is_notified_once(memory: Memory) -> None:
    port = Posts()
    prefixes = CorruptPrefixes(memory.cache, port)
    prefixes.found(CorruptPrefix(TOKENS, OTHERS, (7, 5, 7)))
    message = InvalidatePrefix(TOKENS.tobytes(), OTHERS)
    assert port.take() == [InvalidateCommand(7, message), InvalidateCommand(5, message)]
    prefixes.found(CorruptPrefix(TOKENS, OTHERS, ()))
    assert not port.take()


# Any paired node may send such requests, correct or not. Their cost is limited.
def test_requests_over_the_limit_are_ignored(memory: Memory) -> None:
    now = 100.0
    prefixes = CorruptPrefixes(memory.cache, Posts(), lambda: now)
    asked = InvalidatePrefix(TOKENS.tobytes())

    def accepted() -> int:
        """Return the number of accepted requests out of a flood."""
        before = prefixes.counts["forgotten_prefixes/asked"]
        for _ in range(10 * MAX_INVALIDATIONS):
            prefixes.asked(asked)
        return prefixes.counts["forgotten_prefixes/asked"] - before

    memory.learn(b"", NUM_PAGES)
    memory.learn(OTHERS, NUM_PAGES)
    assert accepted() == MAX_INVALIDATIONS
    assert num_cached(memory, b"") == 0
    assert num_cached(memory, OTHERS) == NUM_PAGES * PAGE_SIZE
    memory.learn(b"", NUM_PAGES)
    assert accepted() == 0
    assert num_cached(memory, b"") == NUM_PAGES * PAGE_SIZE
    now += 3 * INVALIDATION_INTERVAL_S
    assert accepted() == 3
    now += 1e6
    assert accepted() == MAX_INVALIDATIONS

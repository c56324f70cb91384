"""Readers of KV events know the content of the prefix cache.

They decode msgpack arrays here, from vLLM's documentation of the schema.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from common.requests.namespace import SHARED, Namespace, namespace_of, page_names
from engine.kv_cache import kv_events
from engine.kv_cache.kv_events import CacheEvents, KvEventLog
from tests.engine.kv_cache.test_cache_events import Watched
from tests.engine.kv_cache.test_prefix_cache import SIZE

THEIRS = namespace_of("theirs")


def adapter_of(namespace: Namespace) -> str | None:
    return {SHARED: "", namespace_of("adapted"): "pirate"}.get(namespace)


class Reader:
    """A router. Every block names its predecessor, which must be known."""

    def __init__(self) -> None:
        self.prompts: dict[int, tuple[int, ...]] = {}  # by block hash
        self.stored: list[list[Any]] = []
        self.num_cleared = 0

    def read(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            at, events, rank = msgspec.msgpack.decode(payload)
            assert at > 1.7e9 and rank == 3
            for tag, *fields in events:
                getattr(self, tag)(*fields)

    def BlockStored(self, hashes, parent, tokens, size, lora_id, medium, *rest) -> None:
        assert (size, lora_id, medium) == (SIZE, None, "GPU")
        assert len(tokens) == len(hashes) * size <= kv_events.MAX_TOKENS_PER_BATCH
        prompt = () if parent is None else self.prompts[parent]
        for start, each in zip(range(0, len(tokens), size), hashes, strict=True):
            prompt += tuple(tokens[start : start + size])
            self.prompts[each] = prompt
        self.stored.append([parent, *rest])

    def BlockRemoved(self, hashes, medium) -> None:
        assert medium == "GPU"
        for each in hashes:
            del self.prompts[each]

    def AllBlocksCleared(self) -> None:
        self.num_cleared += 1
        self.prompts.clear()


def logged(seed: int, num_pages: int = 48, max_pages: int = 1 << 16) -> tuple[Watched, KvEventLog]:
    watched = Watched(seed, num_pages=num_pages)
    log = KvEventLog(watched.cache, adapter_of, 3, max_pages)
    watched.events = CacheEvents(log)
    return watched, log


@pytest.mark.parametrize("seed", range(10))
def test_a_reader_knows_the_tokens_of_every_page_in_the_tree_and_watchers_still_work(seed):
    watched, log = logged(seed)
    reader = Reader()
    for turn in range(60):
        if turn == 20:
            watched.start()
        watched.use_many(8)
        reader.read(log.take())
        assert set(reader.prompts) == watched.truth()
        if turn > 20:
            watched.check_known()
    assert reader.num_cleared == 1
    for name, prompt in reader.prompts.items():
        assert name in {page_names(prompt, SIZE, each)[-1] for each in (SHARED, THEIRS)}
    assert list(log.take()) == []


def test_beyond_the_limit_of_changes_everything_is_listed_again():
    watched, log = logged(1, num_pages=400, max_pages=10)
    reader = Reader()
    for _ in range(40):
        watched.use_many(12)
        reader.read(log.take())
        assert set(reader.prompts) == watched.truth()
    assert reader.num_cleared > 3


def test_long_prompts_are_cut_into_batches_that_continue_each_other(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_TOKENS_PER_BATCH", 4 * SIZE)
    watched, log = logged(1)
    reader = Reader()
    prompt = list(range(9 * SIZE))
    watched.learn(prompt)
    payloads = list(log.take())
    assert len(payloads) == 3
    reader.read(payloads)
    assert set(reader.prompts) == set(page_names(prompt, SIZE))


def test_adapters_are_named_and_private_namespaces_are_marked_as_salted():
    watched, log = logged(1)
    reader = Reader()
    reader.read(log.take())
    for namespace in (SHARED, namespace_of("adapted"), THEIRS):
        watched.learn(list(range(2 * SIZE)), namespace)
    watched.learn(list(range(3 * SIZE)), THEIRS)
    reader.read(log.take())
    parent = page_names(range(2 * SIZE), SIZE, THEIRS)[-1]
    salt = [THEIRS.hex()]
    assert reader.stored == [
        [None, None, None],
        [None, "pirate", None],
        [None, None, [salt, None]],
        [parent, None, None],
    ]

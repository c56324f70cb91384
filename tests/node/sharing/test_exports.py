"""Exports of a producer: pages that other nodes may read, and how long it holds them."""

from types import SimpleNamespace
from typing import cast

import pytest

from common.config import PrefixSharingConfig
from common.page_tables import PageTables
from common.request import Remaining
from common.requests.images import Image
from common.requests.namespace import as_bytes
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from kvtransfer.messages import Embeddings, HandoffId, Prefix
from kvtransfer.ports import ClosedEvent, FailCommand, GrantedEvent, OpenedEvent, PublishCommand
from node.sharing.exports import MAX_ASKED, SHARE, PrefixExports
from node.sharing.prefixes import PrefixSharing
from node.sharing.reads import SharedReads
from tests.kvtransfer.search.sides.hand_off import PAGE_SIZE
from tests.kvtransfer.search.sides.prefix import Memory, Posts

ID = HandoffId(1, 1, 1)
HAS = 3  # pages
ASKED = (HAS + 1) * PAGE_SIZE


@pytest.fixture
def memory() -> Memory:
    memory = Memory(SHARE * HAS, PageTables(PAGE_SIZE))
    memory.learn(b"", HAS)
    return memory


def loans_of(memory: Memory, port: Posts, *, enabled: bool = True) -> PrefixExports:
    own = {"cache": memory.cache, "pages": memory.pages, "tiers": None, "port": port}
    return PrefixExports(enabled=enabled, tables=PageTables(PAGE_SIZE), **own)


def opened(serial: int) -> tuple[OpenedEvent, Prefix]:
    prefix = Prefix(as_bytes(range(ASKED)))
    return OpenedEvent(serial, ID, b"", Remaining(9.0), prefix), prefix


def num_lent(memory: Memory) -> int:
    return int(memory.pages.holds(PageHolder.PUBLICATION).sum())


def test_no_page_is_held_before_the_consumer_has_pages_for_it(memory: Memory) -> None:
    port = Posts()
    loans = loans_of(memory, port)
    loans.opened(*opened(1))
    assert num_lent(memory) == 0 and not port.take()
    loans.granted(GrantedEvent(1, PAGE_SIZE))
    assert num_lent(memory) == HAS - 1
    (published,) = port.take()
    assert isinstance(published, PublishCommand) and published.last
    assert (published.start, published.end) == (PAGE_SIZE, HAS * PAGE_SIZE)
    loans.closed(ClosedEvent(1, ID, True, ""))
    assert num_lent(memory) == 0 and not loans.pages_in_use


def test_a_consumer_that_leaves_before_the_grant_holds_no_page(memory: Memory) -> None:
    loans = loans_of(memory, Posts())
    loans.opened(*opened(1))
    loans.closed(ClosedEvent(1, ID, False, "gone"))
    loans.granted(GrantedEvent(1, 0))
    assert num_lent(memory) == 0 and not loans.pages_in_use


@pytest.mark.parametrize(
    "why", ["it has no more", "too many pages are exported", "it does not export"]
)
def test_an_impossible_export_is_rejected_at_once(memory: Memory, why: str) -> None:
    port = Posts()
    loans = loans_of(memory, port, enabled=why != "it does not export")
    if why == "too many pages are exported":
        loans.opened(*opened(1))
        loans.granted(GrantedEvent(1, 0))
        port.take()
    before = num_lent(memory)
    loans.opened(*opened(2))
    loans.granted(GrantedEvent(2, HAS * PAGE_SIZE if why == "it has no more" else 0))
    (refused,) = port.take()
    assert isinstance(refused, FailCommand) and not refused.retryable
    assert num_lent(memory) == before
    loans.closed(ClosedEvent(2, ID, False, "refused"))
    assert loans.counts["prefix_loans/refused"] == 1


def test_the_number_of_waiting_exports_is_limited(memory: Memory) -> None:
    port = Posts()
    loans = loans_of(memory, port)
    for serial in range(MAX_ASKED + 1):
        loans.opened(*opened(serial))
    (refused,) = port.take()
    assert isinstance(refused, FailCommand) and refused.serial == MAX_ASKED
    for serial in range(MAX_ASKED + 1):
        loans.closed(ClosedEvent(serial, ID, False, "gone"))
    assert not loans.pages_in_use


def test_a_node_that_encodes_only_for_itself_rejects_images(memory: Memory) -> None:
    port, shape = Posts(), SimpleNamespace(tables=PageTables(PAGE_SIZE))
    core = SimpleNamespace(cache=memory.cache, pages=memory.pages, tiers=None, shape=shape)
    sharing = PrefixSharing(
        PrefixSharingConfig(),
        SharedReads(1, memory.cache, port),
        port,
        core=cast(EngineCore, core),
        page_bytes=64,
        weights=None,
    )
    source = Embeddings(Image(0, 1, 1, b"rgb"), 1, 64)
    assert sharing.handle(OpenedEvent(1, ID, b"", Remaining(9.0), source))
    assert port.take() == [FailCommand(1, "this is not an encode node", retryable=False)]
    closed = ClosedEvent(1, ID, False, "")
    assert sharing.handle(GrantedEvent(1, 0)) and sharing.handle(closed)
    assert not sharing.handle(closed)  # a later hand-off with this serial is not one of these

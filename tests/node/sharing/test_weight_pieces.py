"""Weights that are read between nodes whose pages differ in size."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from common.page_tables import PageTables
from common.request import Remaining
from engine.models.checkpoint import StoredTensor
from engine.models.one_file import OneFile, ReceivedFile
from engine.update import WeightUpdater
from kvtransfer.messages import HandoffId, Weights
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailCommand,
    GrantCommand,
    GrantedEvent,
    OpenCommand,
    OpenedEvent,
    ProducerUp,
    PublishCommand,
    ReadsEndedEvent,
)
from node.sharing.reads import SharedReads
from node.sharing.weight_reads import WeightReads
from node.sharing.weights import WeightExports
from tests.kvtransfer.search.sides.hand_off import PAGE_SIZE
from tests.kvtransfer.search.sides.prefix import Memory, Posts

WEIGHTS = b"w" * 16
PRODUCER, ADDRESS = 7, "host:1"
NUM_PAGES = 64  # of each node
FILE_BYTES = 5000
OLD_KV = 255
WAIT_S = 60.0


class Updater:
    """The weights of a node. `received` has the fetched ones."""

    def __init__(self, root: Path) -> None:
        self.id, self.whole = WEIGHTS, True
        self.received = ReceivedFile(root)
        path = root / "tensors"
        path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
        self.file = OneFile({"a": StoredTensor(path, "I8", (FILE_BYTES,), 0, FILE_BYTES)})

    def exported(self) -> OneFile:
        return self.file

    def receive(self) -> ReceivedFile:
        return self.received

    def prepare_received(self, received: ReceivedFile, named: str) -> "Future[bytes]":
        future: Future[bytes] = Future()
        future.set_result(WEIGHTS)
        return future


class Node:
    """Pages of one size, full of old KV, with both ends of weight transfers."""

    def __init__(self, page_bytes: int, updater: Updater) -> None:
        self.memory = Memory(NUM_PAGES, PageTables(PAGE_SIZE))
        self.pool: Tensor = torch.full((NUM_PAGES, page_bytes), OLD_KV, dtype=torch.uint8)
        self.port = Posts()
        self.done = threading.Semaphore(0)  # tasks that run beside the engine
        weights, cache, pages = cast(WeightUpdater, updater), self.memory.cache, self.memory.pages
        self.gauges: dict[str, float] = {}
        both = self.pool, self.port, self.gauges, self.done.release
        self.exports = WeightExports(weights, cache, pages, *both)
        self.shared = SharedReads(PRODUCER + 1, cache, self.port)
        self.reads = WeightReads(
            weights,
            self.shared,
            gauges=self.gauges,
            pages=pages,
            pool=self.pool,
            port=self.port,
            notify=self.done.release,
        )

    def wait(self) -> None:
        assert self.done.acquire(timeout=WAIT_S)


@pytest.fixture
def updater(tmp_path: Path) -> Iterator[Updater]:
    updater = Updater(tmp_path)
    yield updater
    updater.received.close()


def lent(producer: Node, serial: int, source: Weights) -> Any:
    """Return the producer's command for pieces that a consumer requests."""
    opened = OpenedEvent(serial, HandoffId(1, 1, 1), WEIGHTS, Remaining(9.0), source)
    producer.exports.opened(opened, source)
    producer.exports.granted(GrantedEvent(serial, 0))
    refused = producer.port.take()
    if not refused:
        producer.wait()
        producer.exports.poll()
        refused = producer.port.take()
    (command,) = refused
    return command


def carry_out(
    producer: Node, consumer: Node, opening: OpenCommand, grant: GrantCommand, size: int
) -> None:
    """Carry out one read of the consumer, over a link that copies `size` bytes of each page."""
    serial = opening.id.request
    assert isinstance(opening.source, Weights)
    published = lent(producer, serial, opening.source)
    assert isinstance(published, PublishCommand)
    there, here = (
        torch.from_numpy(pages[: len(published.pages)]).long()
        for pages in (published.pages, grant.destination_pages)
    )
    consumer.pool[here, :size] = producer.pool[there, :size]
    consumer.reads.held(CompletedEvent(opening.id, 0.0, published.end))
    consumer.reads.reads_ended(ReadsEndedEvent(opening.id))
    producer.exports.closed(ClosedEvent(serial, opening.id, True, ""))
    producer.exports.poll()
    consumer.wait()


# Seen failing with the consumer's pages copied as a whole, and with the producer's bytes counted by
# its pages.
@pytest.mark.parametrize("sizes", [(96, 96), (96, 192), (192, 96), (96, 128), (8192, 96)])
def test_a_piece_has_the_size_of_the_smaller_page(updater: Updater, sizes: tuple[int, int]) -> None:
    producer, consumer = (Node(page_bytes, updater) for page_bytes in sizes)
    size = min(sizes)
    consumer.shared.note(ProducerUp(PRODUCER, ADDRESS, "tcp", 1.0, size))
    for _ in consumer.reads.read(WEIGHTS, ADDRESS):
        commands = consumer.port.take()
        for opening, grant in zip(commands[::2], commands[1::2], strict=True):
            carry_out(producer, consumer, opening, grant, size)
        consumer.reads.poll()
    assert consumer.gauges["total_weight_reads/completed"] == 1
    whole, path = bytearray(updater.file.num_bytes), updater.received.directory
    assert updater.file.read(0, memoryview(whole)) == len(whole)
    assert (path / "model.safetensors").read_bytes() == whole
    lent = producer.gauges["total_weight_bytes/sent"]
    assert lent == consumer.gauges["total_weight_bytes/read"] >= len(whole)
    for node in (producer, consumer):
        assert node.memory.pages.num_free == NUM_PAGES


# Seen failing without the check: the producer's worker fails, and the node with it.
@pytest.mark.parametrize("piece_bytes", [0, 97, 1 << 40])
def test_pieces_that_do_not_fit_into_a_page_are_rejected(
    updater: Updater, piece_bytes: int
) -> None:
    producer = Node(96, updater)
    refused = lent(producer, 1, Weights(0, 4, piece_bytes))
    assert isinstance(refused, FailCommand) and not refused.retryable
    assert f"{piece_bytes} bytes does not fit into a page of 96" in refused.reason
    assert producer.memory.pages.num_free == NUM_PAGES


# Seen failing with pages of which only the beginning is overwritten.
@pytest.mark.parametrize("first, num_pieces", [(0, 4), (FILE_BYTES - 2, 1 << 20), (2**32 - 1, 1)])
def test_small_pieces_reveal_no_earlier_content_of_a_page(
    updater: Updater, first: int, num_pieces: int
) -> None:
    producer = Node(96, updater)
    published = lent(producer, 1, Weights(first, num_pieces, 1))
    assert isinstance(published, PublishCommand)
    start, num_bytes = min(first, updater.file.num_bytes), len(published.pages)
    assert num_bytes == min(num_pieces, NUM_PAGES // 8, updater.file.num_bytes - start)
    expected = bytearray(num_bytes)
    updater.file.read(start, memoryview(expected))
    pages = producer.pool[torch.from_numpy(published.pages).long()]
    assert pages[:, 0].tolist() == list(expected) and not pages[:, 1:].any()

"""No death of one end takes the other with it, and none goes unseen."""

import random
import threading
import time

import pytest

from common.errors import TransferError
from kvtransfer.backends.base import CONNECT_S, Backend
from tests.support.data_children import READER, Memory, make_backend, scattered
from tests.support.data_ends import Ends, FarReader

NUM_PAGES, PAGE_BYTES = 256, 65536
NUM_DEATHS = 30
NUM_SPARES = 5  # started ahead


@pytest.fixture
def path(far_backend: str) -> Backend:
    return make_backend(far_backend)


def _random_moment() -> None:
    threading.Event().wait(random.uniform(0, 0.02))


def test_an_owner_lives_through_readers_killed_mid_read(ends: Ends, path: Backend) -> None:
    owner = ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES)
    owner.publish_all()
    spares: list[FarReader] = []
    for number in range(NUM_DEATHS):
        while len(spares) < min(NUM_SPARES, NUM_DEATHS - number):
            spares.append(ends.far_reader(path.name, NUM_PAGES, PAGE_BYTES))
        reader = spares.pop(0)
        reader.read_from(owner)
        _random_moment()
        reader.child.kill()
        owner.has_run()
    assert owner.child.alive
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    ends.connect(path, owner, memory).copy(source, destination)
    assert (memory.pages[destination] == owner.content[source]).all()
    assert ends.log.read_text() == ""


def test_a_reader_lives_through_owners_killed_mid_read(ends: Ends, path: Backend) -> None:
    reader = ends.far_reader(path.name, NUM_PAGES, PAGE_BYTES)
    spares = [ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES) for _ in range(NUM_SPARES)]
    for number in range(NUM_DEATHS):
        owner = spares.pop(0)
        if number + NUM_SPARES < NUM_DEATHS:
            spares.append(ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES))
        owner.publish_all()
        reader.read_from(owner)
        _random_moment()
        killed_at = time.monotonic()
        owner.child.kill()
        _, failed_at = reader.failed(2.0)
        assert failed_at - killed_at < 2.0
    assert reader.child.alive
    assert ends.log.read_text() == ""


def test_connecting_to_a_frozen_owner_ends_in_time(ends: Ends, path: Backend) -> None:
    owner = ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES)
    description, memory = owner.describe(), Memory(NUM_PAGES, PAGE_BYTES)
    owner.child.freeze()
    started_at = time.monotonic()
    with pytest.raises(TransferError):
        path.connect(description, owner.remote, memory.pool, READER)
    assert time.monotonic() - started_at < CONNECT_S + 2.0
    owner.child.thaw()
    owner.publish_all()
    ends.connect(path, owner, memory).copy(*scattered(0, NUM_PAGES, NUM_PAGES))

"""No death of one end takes the other with it, none goes unseen, and none leaves anything."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.errors import TransferError
from kvtransfer.backends.base import TransferBackend
from tests.support.data_children import Child, Memory, make_backend, scattered
from tests.support.data_ends import Ends, FarOwner, FarReader, closing, wait_for
from tests.support.isolation import left_behind

NUM_PAGES, PAGE_BYTES = 256, 65536
NUM_SPARES = 5  # started ahead


@pytest.fixture(params=[3, pytest.param(20, marks=pytest.mark.long)])
def deaths(request: pytest.FixtureRequest) -> int:
    """The number of processes that are killed."""
    return int(request.param)


@pytest.fixture
def path(far_backend: str) -> TransferBackend:
    return make_backend(far_backend)


def _random_moment() -> None:
    threading.Event().wait(random.uniform(0, 0.02))


def _readers(ends: Ends, path: TransferBackend, count: int) -> Iterator[FarReader]:
    spares: list[FarReader] = []
    for number in range(count):
        while len(spares) < min(NUM_SPARES, count - number):
            spares.append(ends.far_reader(path.name, NUM_PAGES, PAGE_BYTES))
        yield spares.pop(0)


def _owners(ends: Ends, path: TransferBackend, count: int) -> Iterator[FarOwner]:
    spares: list[FarOwner] = []
    for number in range(count):
        while len(spares) < min(NUM_SPARES, count - number):
            spares.append(ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES))
        owner = spares.pop(0)
        owner.publish_all()
        yield owner


@contextmanager
def _leaving_nothing(child: Child, dead: list[Child]) -> Iterator[None]:
    """The process has what it had before of descriptors and of memory shared with others, and the
    machine has nothing of the dead."""
    had, before = _held(child), left_behind()
    yield
    wait_for(lambda: _held(child) == had)
    wait_for(lambda: left_behind() <= before)
    creators = {line.split()[4] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}
    assert creators.isdisjoint(str(one.pid) for one in dead)


def _held(child: Child) -> tuple[int, int]:
    """(open descriptors, mappings of memory that UCX shares)."""
    process = Path(f"/proc/{child.pid}")
    return len(list((process / "fd").iterdir())), (process / "maps").read_text().count("/ucx_shm")


def _serves(ends: Ends, path: TransferBackend, owner: FarOwner) -> None:
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    with closing(path.connect(owner.admit(), owner.remote, memory.pool)) as connection:
        connection.copy(source, destination)
    assert (memory.pages[destination] == owner.content[source]).all()
    assert ends.log.read_text() == ""


def test_an_owner_lives_through_readers_killed_mid_read(ends, path, deaths):
    owner = ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES)
    owner.publish_all()
    _serves(ends, path, owner)
    dead: list[Child] = []
    with _leaving_nothing(owner.child, dead):
        for reader in _readers(ends, path, deaths):
            reader.read_from(owner)
            _random_moment()
            reader.child.kill()
            dead.append(reader.child)
            owner.has_run()
    _serves(ends, path, owner)


def test_a_reader_lives_through_owners_killed_mid_read(ends, path, deaths):
    reader = ends.far_reader(path.name, NUM_PAGES, PAGE_BYTES)
    dead: list[Child] = []
    with _leaving_nothing(reader.child, dead):
        for owner in _owners(ends, path, deaths):
            reader.read_from(owner)
            _random_moment()
            owner.child.kill()
            dead.append(owner.child)
            reader.failed()  # told: a read has no deadline of its own
    assert reader.child.alive
    assert ends.log.read_text() == ""


def test_an_owner_that_is_frozen_lives_through_the_death_of_its_readers(ends, path, deaths):
    owner = ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES)
    owner.publish_all()
    for reader in _readers(ends, path, deaths):
        reader.read_from(owner)
        owner.child.freeze()
        _random_moment()
        reader.child.kill()
        owner.child.thaw()
        owner.has_run()
    _serves(ends, path, owner)


def test_a_reader_that_is_frozen_lives_through_the_death_of_its_owners(ends, path, deaths):
    reader = ends.far_reader(path.name, NUM_PAGES, PAGE_BYTES)
    for owner in _owners(ends, path, deaths):
        reader.read_from(owner)
        _random_moment()
        reader.child.freeze()
        owner.child.kill()
        reader.child.thaw()
        reader.failed()
    assert reader.child.alive
    assert ends.log.read_text() == ""


def test_connecting_to_a_frozen_owner_ends_in_time(ends, path):
    owner = ends.far_owner(path.name, NUM_PAGES, PAGE_BYTES)
    description, memory = owner.admit(), Memory(NUM_PAGES, PAGE_BYTES)
    owner.child.freeze()
    with suppress(TransferError):  # nixl needs nothing of the owner; tcp waits for CONNECT_S
        path.connect(description, owner.remote, memory.pool).close()
    owner.child.thaw()
    owner.publish_all()
    ends.connect(path, owner, memory).copy(*scattered(0, NUM_PAGES, NUM_PAGES))

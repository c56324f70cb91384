"""Pages in two files of a directory, in slots: one has the pages, the other a record of each
(page_records.py). Nothing that is read is believed before its checksum is right.

One process has a directory at a time. Knows nothing of what is in a page, nor which slot is to be
used. Any thread may call, but what concerns one slot only in turns.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.logs import kv
from engine.offload.page_records import (
    HEADER_BYTES,
    RECORD_BYTES,
    Record,
    checksum,
    header,
    packed,
    unpacked,
)
from engine.offload.private_files import open_directory, open_file

MOST_NODES = 64  # that share a directory, each with one below it
_FLAG = "engine.tiers.file_dir"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class Fault(Enum):
    """Why a page is not in its slot, or cannot be had from there."""

    FULL = "full"
    WRITE = "write"
    READ = "read"
    DAMAGED = "damaged"


class SlotWrite(NamedTuple):
    """record: but for its checksum."""

    slot: int
    host_page: int
    record: Record


class SlotRead(NamedTuple):
    slot: int
    host_page: int


class PageFiles:
    """
    Attributes:
        directory: the one below what was asked for that is this process's.
        num_slots: for a page each.
    """

    def __init__(
        self, root: Path, memory: NDArray[np.uint8], *, version: bytes, num_bytes: int
    ) -> None:
        """
        Args:
            root: what is below it is only for those who may read prompts.
            memory: host pages [n, page bytes], contiguous.
            version: see version_of. What is there of another one is given up.
            num_bytes: that the files have at most.
        Raises:
            ConfigError: they cannot be there, or would have no page.
        """
        page_bytes = memory.shape[1]
        self._page_bytes = page_bytes
        self._memory = memory
        self._header = header(version, page_bytes)
        self.num_slots = max(0, num_bytes - HEADER_BYTES) // (page_bytes + RECORD_BYTES)
        if not self.num_slots:
            raise ConfigError(
                f"engine.tiers.file_bytes: {num_bytes} have no room for a page of {page_bytes}"
            )
        try:
            self.directory, self._index = _claim(root, self._header)
            self._pages = _opened(self.directory, "pages")
            self._fit()
        except OSError as error:
            raise ConfigError(f"{_FLAG}: {error}") from error
        self._checksums = np.zeros(self.num_slots, np.uint64)  # by slot, of what ought to be there
        self._told: set[Fault] = set()

    def found(self) -> Iterator[tuple[int, Record]]:
        """Slots and records of what is there from before. To be read through before anything is
        written."""
        index = bytearray(max(0, os.fstat(self._index).st_size - HEADER_BYTES))
        num_read = _read_all(self._index, memoryview(index), HEADER_BYTES)
        num_pages = os.fstat(self._pages).st_size // self._page_bytes
        for slot, record in unpacked(bytes(index[:num_read])):
            if slot < num_pages:
                self._checksums[slot] = record.checksum
                yield slot, record

    def write(self, writes: Sequence[SlotWrite]) -> list[Fault | None]:
        """Returns of each why it failed."""
        return [self._write(each) for each in writes]

    def read(self, reads: Sequence[SlotRead]) -> list[Fault | None]:
        """Into host pages; returns of each why there is nothing to be used there."""
        return [self._read(each) for each in reads]

    def erase(self, slots: Sequence[int]) -> None:
        """These are empty: nobody finds what was there."""
        try:
            for slot in slots:
                _write_all(self._index, memoryview(bytes(RECORD_BYTES)), _record_at(slot))
        except OSError as error:
            self._tell(Fault.WRITE, error)

    def clear(self) -> None:
        """All slots are empty, and the disk has its room back."""
        try:
            self._empty()
        except OSError as error:
            self._tell(Fault.WRITE, error)

    def close(self) -> None:
        """Others may have the directory."""
        os.close(self._pages)
        os.close(self._index)

    def _write(self, write: SlotWrite) -> Fault | None:
        slot, page = write.slot, memoryview(self._memory[write.host_page])
        record = write.record._replace(checksum=checksum(page))
        try:
            _write_all(self._pages, page, slot * self._page_bytes)
            _write_all(self._index, memoryview(packed(record, slot)), _record_at(slot))
        except OSError as error:
            fault = Fault.FULL if error.errno in _FULL else Fault.WRITE
            self._tell(fault, error)
            return fault
        self._checksums[slot] = record.checksum
        return None

    def _read(self, read: SlotRead) -> Fault | None:
        page = memoryview(self._memory[read.host_page])
        try:
            num_read = _read_all(self._pages, page, read.slot * self._page_bytes)
        except OSError as error:
            self._tell(Fault.READ, error)
            return Fault.READ
        if num_read < self._page_bytes or checksum(page) != self._checksums[read.slot]:
            self._tell(Fault.DAMAGED, None)
            return Fault.DAMAGED
        return None

    def _fit(self) -> None:
        """Of what is there from before nothing is left that is of another version, or too much."""
        if os.pread(self._index, HEADER_BYTES, 0) != self._header:
            self._empty()
        _cut(self._index, _record_at(self.num_slots))
        _cut(self._pages, self.num_slots * self._page_bytes)

    def _empty(self) -> None:
        os.ftruncate(self._index, 0)
        os.ftruncate(self._pages, 0)
        _write_all(self._index, memoryview(self._header), 0)

    def _tell(self, fault: Fault, error: OSError | None) -> None:
        """Once of each kind: metrics count them."""
        if fault not in self._told:
            self._told.add(fault)
            why = "its checksum is wrong" if error is None else str(error)
            log.error(
                "a page in a file failed %s",
                kv(fault=fault.value, directory=str(self.directory), reason=why),
            )


def _claim(root: Path, header: bytes) -> tuple[Path, int]:
    """A directory below `root` that no process has, and its index, locked until that is closed:
    rather one that was left with this header."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    places = [root / str(number) for number in range(MOST_NODES)]
    for place in places:
        index = _lock(place) if os.path.lexists(place) else None
        if index is not None:
            if os.pread(index, HEADER_BYTES, 0) == header:
                return place, index
            os.close(index)
    for place in places:
        index = _lock(place)
        if index is not None:
            return place, index
    raise ConfigError(f"{_FLAG}: {MOST_NODES} nodes have {root} already")


def _lock(place: Path) -> int | None:
    """None: somebody has it."""
    index = _opened(place, "index")
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(index)
        return None
    return index


def _opened(place: Path, name: str) -> int:
    """Open a file of one of the directories; see private_files.py for what is refused."""
    directory = open_directory(place)
    try:
        return open_file(place / name, directory)
    finally:
        os.close(directory)


def _record_at(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD_BYTES


def _cut(file: int, num_bytes: int) -> None:
    if os.fstat(file).st_size > num_bytes:
        os.ftruncate(file, num_bytes)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        num_written = os.pwrite(file, data, at)
        data, at = data[num_written:], at + num_written


def _read_all(file: int, into: memoryview, at: int) -> int:
    """Returns how many bytes there were."""
    num_read = 0
    while num_read < len(into):
        more = os.preadv(file, [into[num_read:]], at + num_read)
        if not more:
            break
        num_read += more
    return num_read

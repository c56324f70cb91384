"""Pages in slots of two files: one has the pages, the other a record of each page (`PageRecord`).

Data is used only if its checksum is correct. Each directory belongs to one process at a time. This
module does not know the contents of a page or the choice of slots. Any thread may call it, but
calls for the same slot must not overlap.

In a shared directory, an attacker may create a link or a file under a name that is opened later.
Files are therefore checked on the open descriptor, before anything is read or truncated.

Nodes on several hosts may share a directory. Each locks its own subdirectory by flock. Some mounts
keep these locks on one host only, so that two nodes could write the same files. `check_locks`
rejects such mounts.
"""

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.logs import kv
from engine.offload.page_records import (
    HEADER_BYTES,
    RECORD_BYTES,
    PageRecord,
    checksum,
    header,
    packed,
    unpacked,
)

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = frozenset({"nolock", "local_lock=all", "local_lock=flock"})
_SMB = frozenset({"nobrl", "nolock"})
# By file system: the mount options with which locks are local to one host.
_LOCAL = {
    "nfs": _NFS,
    "nfs4": _NFS,
    "cifs": _SMB,
    "smb3": _SMB,
    "lustre": frozenset({"localflock", "noflock"}),
}
_UNKNOWN = re.compile(r"fuse\b|virtiofs|9p")  # it depends on the file system behind them

log = logging.getLogger(__name__)


class Mount(NamedTuple):
    """A mounted file system."""

    at: Path
    kind: str
    options: frozenset[str]


def check_locks(directory: Path, mounts: str = "") -> None:
    """Check the mount of an existing directory.

    Args:
        mounts: the contents of mountinfo. Empty: read those of this process.
    Raises:
        ConfigError: locks are local to this host, and other hosts may mount the directory.
    """
    mount = _mount_of(directory.resolve(), mounts or _MOUNTS.read_text())
    if mount is None:
        return
    if found := sorted(mount.options & _LOCAL.get(mount.kind, frozenset())):
        raise ConfigError(
            f"{_FLAG}: {directory} is on {mount.kind} mounted with {found[0]}, so nodes on other "
            "hosts do not see the lock of this node: mount it without that option, or choose a "
            "directory of this host"
        )
    if _UNKNOWN.match(mount.kind):
        log.warning(
            "file locks may not work across hosts, so each host needs its own directory %s",
            kv(directory=str(directory), file_system=mount.kind),
        )


def _mount_of(directory: Path, text: str) -> Mount | None:
    """Return the mount with the directory. If several are mounted at the same place, the newest
    one."""
    nearest = None
    for mount in _parsed(text):
        above = directory.is_relative_to(mount.at)
        if above and (nearest is None or len(mount.at.parts) >= len(nearest.at.parts)):
            nearest = mount
    return nearest


def _parsed(text: str) -> Iterator[Mount]:
    for line in text.splitlines():
        own, _, of_system = line.partition(" - ")
        fields, (kind, _, options) = own.split(" "), of_system.split(" ", 2)
        at = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        yield Mount(Path(at), kind, frozenset(f"{fields[5]},{options}".split(",")))


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO may block forever. It has no effect on regular files.
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_directory(path: Path) -> int:
    """Return a descriptor of the directory. It is created if it does not exist.

    Raises:
        OSError: it is a symbolic link, or has another owner.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    return _own_only(_descriptor_of(path, path, _DIRECTORY, None), path, 0o700)


def open_file(path: Path, directory: int) -> int:
    """Return a descriptor of a regular file. It is created if it does not exist.

    Args:
        directory: descriptor of the directory that contains it.
    Raises:
        OSError: it is a symbolic link, has another owner or a second hard link, or is not a regular
            file.
    """
    file = _descriptor_of(path, path.name, _FILE, directory)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _unsafe(path, "is not a regular file")
        if found.st_nlink != 1:
            raise _unsafe(path, f"has {found.st_nlink} hard links")
    except OSError:
        os.close(file)
        raise
    return _own_only(file, path, 0o600)


def _descriptor_of(path: Path, name: Path | str, flags: int, directory: int | None) -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if path.is_symlink():
            raise _unsafe(path, "is a symbolic link") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _own_only(descriptor: int, path: Path, mode: int) -> int:
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise _unsafe(path, f"belongs to user {owner}, not to {os.geteuid()}")
        os.fchmod(descriptor, mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _unsafe(path: Path, why: str) -> OSError:
    return OSError(errno.EPERM, f"it {why}; remove it, or choose another directory", str(path))


MOST_NODES = 64  # limit of nodes that share a directory, each in its own subdirectory
_FLAG = "engine.offload.disk_dir"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READERS = 4
T = TypeVar("T")


class FileFault(Enum):
    """The error because of which a page is not in its slot, or cannot be read from it."""

    FULL = "full"
    WRITE = "write"
    READ = "read"
    DAMAGED = "damaged"


class SlotWrite(NamedTuple):
    """A page to write. The record is complete except for its checksum."""

    slot: int
    host_page: int
    record: PageRecord


class SlotRead(NamedTuple):
    slot: int
    host_page: int


class PageFiles:
    """The files of one process.

    Attributes:
        directory: this process's subdirectory of `root`.
        num_slots: number of slots, of one page each.
    """

    def __init__(
        self, root: Path, memory: NDArray[np.uint8], *, version: bytes, num_bytes: int
    ) -> None:
        """Open the files, and discard pages of another version.

        Args:
            root: parent directory. Only users that may read prompts may have access.
            memory: host pages [n, page bytes], contiguous.
            version: see version_of. Existing pages of another version are discarded.
            num_bytes: maximum size of the files.
        Raises:
            ConfigError: the files cannot be created, or are too small for a page.
        """
        page_bytes = memory.shape[1]
        self._page_bytes = page_bytes
        self._memory = memory
        self._header = header(version, page_bytes)
        self.num_slots: int = max(0, num_bytes - HEADER_BYTES) // (page_bytes + RECORD_BYTES)
        if not self.num_slots:
            raise ConfigError(
                f"engine.offload.disk_bytes: {num_bytes} bytes are less than a page of "
                f"{page_bytes} bytes"
            )
        try:
            self.directory, self._index = _claim(root, self._header)
            self._pages = _opened(self.directory, "pages")
            self._fit()
        except OSError as error:
            raise ConfigError(f"{_FLAG}: {error}") from error
        self._checksums = np.zeros(self.num_slots, np.uint64)  # expected checksum by slot
        self._logged: set[FileFault] = set()

    def found(self) -> Iterator[tuple[int, PageRecord]]:
        index = bytearray(max(0, os.fstat(self._index).st_size - HEADER_BYTES))
        num_read = _read_all(self._index, memoryview(index), HEADER_BYTES)
        num_pages = os.fstat(self._pages).st_size // self._page_bytes
        for slot, record in unpacked(bytes(index[:num_read])):
            if slot < num_pages:
                self._checksums[slot] = record.checksum
                yield slot, record

    def write(self, writes: Sequence[SlotWrite]) -> list[FileFault | None]:
        """Write pages. Return the error of each page, or None."""
        return [self._write(each) for each in writes]

    def read(self, reads: Sequence[SlotRead]) -> list[FileFault | None]:
        """Read pages into host pages. Return the error of each page, or None."""
        return [self._read(each) for each in reads]

    def erase(self, slots: Sequence[int]) -> None:
        """Mark slots as empty, so that their pages are not found any more."""
        try:
            for slot in slots:
                _write_all(self._index, memoryview(bytes(RECORD_BYTES)), _record_at(slot))
        except OSError as error:
            self._log_first(FileFault.WRITE, error)

    def clear(self) -> None:
        """Mark all slots as empty, and free the disk space."""
        try:
            self._empty()
        except OSError as error:
            self._log_first(FileFault.WRITE, error)

    def close(self) -> None:
        """Close the files. Another process may then use the directory."""
        os.close(self._pages)
        os.close(self._index)

    def _write(self, write: SlotWrite) -> FileFault | None:
        slot, page = write.slot, memoryview(self._memory[write.host_page])
        record = write.record._replace(checksum=checksum(page))
        try:
            _write_all(self._pages, page, slot * self._page_bytes)
            _write_all(self._index, memoryview(packed(record, slot)), _record_at(slot))
        except OSError as error:
            fault = FileFault.FULL if error.errno in _FULL else FileFault.WRITE
            self._log_first(fault, error)
            return fault
        self._checksums[slot] = record.checksum
        return None

    def _read(self, read: SlotRead) -> FileFault | None:
        page = memoryview(self._memory[read.host_page])
        try:
            num_read = _read_all(self._pages, page, read.slot * self._page_bytes)
        except OSError as error:
            self._log_first(FileFault.READ, error)
            return FileFault.READ
        if num_read < self._page_bytes or checksum(page) != self._checksums[read.slot]:
            self._log_first(FileFault.DAMAGED, None)
            return FileFault.DAMAGED
        return None

    def _fit(self) -> None:
        """Discard existing data of another version, or beyond the size limit."""
        if os.pread(self._index, HEADER_BYTES, 0) != self._header:
            self._empty()
        _cut(self._index, _record_at(self.num_slots))
        _cut(self._pages, self.num_slots * self._page_bytes)

    def _empty(self) -> None:
        os.ftruncate(self._index, 0)
        os.ftruncate(self._pages, 0)
        _write_all(self._index, memoryview(self._header), 0)

    def _log_first(self, fault: FileFault, error: OSError | None) -> None:
        """Log the first error of each kind. Metrics count all errors."""
        if fault not in self._logged:
            self._logged.add(fault)
            why = "its checksum is wrong" if error is None else str(error)
            log.error(
                "page file error %s",
                kv(fault=fault.value, directory=str(self.directory), reason=why),
            )


def _claim(root: Path, header: bytes) -> tuple[Path, int]:
    """Return a subdirectory of `root` that no process uses, preferably with the same header, and
    its locked index file."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_locks(root)
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
    raise ConfigError(f"{_FLAG}: {MOST_NODES} nodes already use {root}")


def _lock(place: Path) -> int | None:
    """Return the locked index file, or None if another process has locked it."""
    index = _opened(place, "index")
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(index)
        return None
    return index


def _opened(place: Path, name: str) -> int:
    """Open a file of a subdirectory. Raise OSError as `open_file` does."""
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
    """Read until `into` is full or the file ends. Return the number of bytes."""
    num_read = 0
    while num_read < len(into):
        more = os.preadv(file, [into[num_read:]], at + num_read)
        if not more:
            break
        num_read += more
    return num_read


class FileThreads:
    """One writer thread, which runs jobs in order, and several reader threads. Owns the files.

    Args:
        notify: called from any of the threads when a job is done.
    """

    def __init__(self, files: PageFiles, notify: Callable[[], None]) -> None:
        self._files = files
        self._notify = notify
        self._writer = ThreadPoolExecutor(1, "write-pages")
        self._readers = ThreadPoolExecutor(READERS, "read-pages")

    @property
    def num_slots(self) -> int:
        return self._files.num_slots

    @property
    def directory(self) -> Path:
        return self._files.directory

    def found(self) -> Iterator[tuple[int, PageRecord]]:
        return self._files.found()

    def write(self, writes: Sequence[SlotWrite]) -> Future[list[FileFault | None]]:
        return self._submit(self._writer, lambda: self._files.write(writes))

    def read(self, reads: Sequence[SlotRead]) -> Future[list[FileFault | None]]:
        return self._submit(self._readers, lambda: self._files.read(reads))

    def erase(self, slots: Sequence[int]) -> None:
        """Erase slots after all earlier writes."""
        self._submit(self._writer, lambda: self._files.erase(slots))

    def clear(self) -> None:
        """Erase all slots after all earlier writes."""
        self._submit(self._writer, self._files.clear)

    def close(self) -> None:
        """Wait for running jobs and for queued jobs of the writer. Cancel queued reads."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._files.close()

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        future = threads.submit(work)
        future.add_done_callback(lambda _: self._notify())
        return future

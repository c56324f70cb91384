"""Witnesses of nodes' pages in shared-memory files, which other nodes on this host read."""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.errors import ConfigError, TransferError
from simulation.device.witness import Words

_WORD_BYTES = 8
_NAME = re.compile(rb"[0-9a-f]{16}")


def pool_directory(configured: Path | None) -> Path:
    """Create this user's directory for the files, and delete the files of killed nodes.

    Raises:
        ConfigError: it cannot be created, or belongs to another user.
    """
    directory = configured or Path(f"/dev/shm/baton-sim-{os.getuid()}")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"engine.sim.pool_dir: {directory} must belong to this user alone (mode 0700)"
            )
        for file in directory.iterdir():
            if _NAME.fullmatch(os.fsencode(file.name)):
                delete_unused(file, Path.unlink)
    except OSError as error:
        raise ConfigError(f"engine.sim.pool_dir: {directory}: {error.strerror}") from error
    return directory


def delete_unused(path: Path, delete: Callable[[Path], None], flags: int = 0) -> None:
    """Delete a file or directory of this user, unless a running process has locked it.

    Args:
        flags: for `os.open`. With O_DIRECTORY, nothing but a directory is opened, so that another
            user's pipe in a shared folder cannot block this process.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.getuid():
                delete(path)
        finally:
            os.close(fd)


class SharedPool:
    """The pages of one node, in a file that is locked until the node ends.

    Attributes:
        name: describes the pool to peers.
    """

    def __init__(self, directory: Path, num_pages: int) -> None:
        self.name = secrets.token_hex(8).encode()
        self._file = directory / self.name.decode()
        new = self._file.with_suffix(".new")  # until it is locked, or another node would delete it
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, num_pages * _WORD_BYTES)
            new.rename(self._file)
            self.pages = _mapped(self._fd, num_pages, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self._fd)
            new.unlink(missing_ok=True)
            raise ConfigError(f"engine.sim.pool_dir: {self._file}: {error.strerror}") from error

    def close(self) -> None:
        """Delete the file. Readers keep its memory. Idempotent."""
        if self._fd >= 0:
            self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def open_pool(directory: Path, name: bytes, num_pages: int) -> Words:
    """Return the pages of another node, read-only.

    Raises:
        TransferError: the node is on another host or has ended, or the pool has another size.
    """
    if _NAME.fullmatch(name) is None:
        raise TransferError("the producer's description of its pool is invalid")
    try:
        fd = os.open(directory / name.decode(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = f"simulated nodes share pages on one host only: {error.strerror}"
        raise TransferError(reason) from error
    try:
        if os.fstat(fd).st_size != num_pages * _WORD_BYTES:
            raise TransferError("the producer's pool has another size than its Hello says")
        return _mapped(fd, num_pages, mmap.PROT_READ)
    finally:
        os.close(fd)


def _mapped(fd: int, num_pages: int, access: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, num_pages * _WORD_BYTES, prot=access), np.uint64)

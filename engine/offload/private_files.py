"""Opening of files and directories so that other users cannot prepare or access them.

An attacker with write access to a shared directory may create a symbolic link, a hard link or a
file under a name that is opened later. Each is checked on the open descriptor, before anything is
read or truncated.
"""

import errno
import os
import stat
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO may block for ever. It has no effect on regular files.
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_directory(path: Path) -> int:
    """Return a descriptor of the directory, which is created if it does not exist.

    Raises:
        OSError: it is a symbolic link, or has another owner.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    return _checked(_opened(path, path, _DIRECTORY, None), path, 0o700)


def open_file(path: Path, directory: int) -> int:
    """Return a descriptor of a regular file, which is created if it does not exist.

    Args:
        directory: descriptor of the directory that contains it.
    Raises:
        OSError: it is a symbolic link, has another owner or a second name, or is not a regular
            file.
    """
    file = _opened(path, path.name, _FILE, directory)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(path, "is not a regular file")
        if found.st_nlink != 1:
            raise _refused(path, f"has {found.st_nlink} hard links")
    except OSError:
        os.close(file)
        raise
    return _checked(file, path, 0o600)


def _opened(path: Path, name: Path | str, flags: int, directory: int | None) -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a symbolic link") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _checked(descriptor: int, path: Path, mode: int) -> int:
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise _refused(path, f"belongs to user {owner}, not to {os.geteuid()}")
        os.fchmod(descriptor, mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refused(path: Path, why: str) -> OSError:
    return OSError(errno.EPERM, f"it {why}; remove it, or choose another directory", str(path))

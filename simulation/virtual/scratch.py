"""The directory of a run, for pools and the router's files. The next run deletes those of killed
ones.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "baton-virtual-"
_NEW = "new-"  # until the directory is locked, or another run would delete it


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make an empty directory, which is deleted at the end. Delete those that no process uses."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _delete_unused(left)
    new = Path(tempfile.mkdtemp(prefix=_NEW + _PREFIX))
    fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    directory = new.rename(new.with_name(new.name.removeprefix(_NEW)))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(fd)


def _delete_unused(directory: Path) -> None:
    """Delete a directory of this user, unless a living process has locked it."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.getuid():
                shutil.rmtree(directory)
        finally:
            os.close(fd)

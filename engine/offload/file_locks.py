"""Check that other hosts see the locks that this host has on files.

Nodes on several hosts may share a directory. Each locks its own part of it by flock. Some mounts
keep these locks on their host, and then two nodes would write the same files.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.logs import kv

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = frozenset({"nolock", "local_lock=all", "local_lock=flock"})
_SMB = frozenset({"nobrl", "nolock"})
# By file system: the options with which locks hold on one host alone.
_LOCAL = {
    "nfs": _NFS,
    "nfs4": _NFS,
    "cifs": _SMB,
    "smb3": _SMB,
    "lustre": frozenset({"localflock", "noflock"}),
}
_UNKNOWN = re.compile(r"fuse\b|virtiofs|9p")  # it depends on what is behind them

log = logging.getLogger(__name__)


class Mount(NamedTuple):
    """A mounted file system."""

    at: Path
    kind: str
    options: frozenset[str]


def check_locks(setting: str, directory: Path, mounts: str = "") -> None:
    """Check the mount of an existing directory.

    Args:
        setting: that names the directory.
        mounts: the contents of mountinfo. Empty: those of this process.
    Raises:
        ConfigError: locks hold on this host alone, and other hosts may have the directory.
    """
    mount = _mount_of(directory.resolve(), mounts or _MOUNTS.read_text())
    if mount is None:
        return
    if found := sorted(mount.options & _LOCAL.get(mount.kind, frozenset())):
        raise ConfigError(
            f"{setting}: {directory} is on {mount.kind} mounted with {found[0]}, so nodes on other "
            "hosts do not see the lock of this node: mount it without that option, or choose a "
            "directory of this host"
        )
    if _UNKNOWN.match(mount.kind):
        log.warning(
            "file locks may not work across hosts, so each host needs its own directory %s",
            kv(directory=str(directory), file_system=mount.kind),
        )


def _mount_of(directory: Path, text: str) -> Mount | None:
    """Return the newest mount of those nearest to the directory."""
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

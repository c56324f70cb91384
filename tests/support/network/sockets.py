"""The open sockets of a process to which others can send, from /proc."""

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INTERNET = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
_LISTENING = "0A"  # state of a TCP socket
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket that listens, or that receives datagrams from any sender."""

    kind: str  # tcp | udp | raw | unix
    host: str  # for a unix socket: "@" and its abstract name, or its path
    port: int


def sockets_of(pid: int) -> list[OpenSocket]:
    """Return the open sockets of a process of this user that accept data from any sender."""
    inodes = set(_inodes(pid))
    return [
        *(
            _internet(kind, fields)
            for kind in _INTERNET
            for fields in _table(pid, kind)
            if fields[9] in inodes and _takes(kind, fields[2], fields[3])
        ),
        *(
            OpenSocket("unix", fields[7], 0)
            for fields in _table(pid, "unix")
            if fields[6] in inodes and len(fields) > 7
        ),
    ]


def _takes(kind: str, far: str, state: str) -> bool:
    """Return whether any sender can reach the socket, not only a connected peer."""
    return state == _LISTENING if kind.startswith("tcp") else int(far.rpartition(":")[2], 16) == 0


def _inodes(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if match := _SOCKET.fullmatch(os.readlink(link)):
                yield match[1]


def _table(pid: int, kind: str) -> Iterator[list[str]]:
    table = Path(f"/proc/{pid}/net/{kind}")
    if table.exists():
        yield from (line.split() for line in table.read_text().splitlines()[1:])


def _internet(kind: str, fields: list[str]) -> OpenSocket:
    host, port = fields[1].split(":")
    words = [struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return OpenSocket(kind.removesuffix("6"), str(address), int(port, 16))

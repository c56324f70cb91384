"""Addresses of servers, and hints about the nodes that hold a prefix of a prompt.

A hint may be wrong. The receiver requests the prefix there and recomputes it if it is missing.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from common.errors import InvalidRequest
from protos import prefixes_pb2

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Return `address` if it is host:port, and no other form that gRPC would resolve.

    Raises:
        InvalidRequest: it is not.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidRequest(f"invalid address, expected host:port: {address[:100]!r}")
    return address


MAX_HINTS = 4  # per request


class PrefixHint(msgspec.Struct, frozen=True):
    """A node by its address, and how many prompt tokens it holds, from the first one on."""

    address: str
    num_tokens: int


def from_proto(entries: Sequence[prefixes_pb2.PrefixAt]) -> tuple[PrefixHint, ...]:
    """Parse hints. Raises InvalidRequest if there are too many, or an address is invalid."""
    if len(entries) > MAX_HINTS:
        raise InvalidRequest(f"prefix_at has {len(entries)} entries, {MAX_HINTS} are allowed")
    return tuple(PrefixHint(check_address(each.address), each.tokens) for each in entries)


def to_proto(hints: Iterable[PrefixHint]) -> list[prefixes_pb2.PrefixAt]:
    return [prefixes_pb2.PrefixAt(address=each.address, tokens=each.num_tokens) for each in hints]

"""Addresses of servers: host:port."""

import re

from common.errors import InvalidRequest

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

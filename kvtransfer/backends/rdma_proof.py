"""The proof of the data path rdma: which RDMA ports of this machine are active, and which of them
agents may use.

Two hosts share no memory that could prove the path. Agents of this path therefore have no socket
transport, so each read uses RDMA or fails.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import TransferError
from kvtransfer.backends.base import PagePool, parse_description

DEVICES = Path("/sys/class/infiniband")
_ACTIVE = "4: ACTIVE"


class RdmaPorts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The producer's active ports, for error messages. UCX finds those that reach each other."""

    ports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=256)]


def active_ports() -> tuple[str, ...]:
    """Return the active ports, such as ("mlx5_0/1",). Raises TransferError if there are none."""
    states = sorted(DEVICES.glob("*/ports/*/state"))
    ports = tuple(
        f"{state.parts[-4]}/{state.parts[-2]}"
        for state in states
        if state.read_text().strip() == _ACTIVE
    )
    if not ports:
        raise TransferError("no RDMA port of this machine is active")
    return ports


def devices() -> str:
    """Return the value for UCX_NET_DEVICES: the user's setting, or every active port, such as
    "mlx5_0:1,mlx5_1:1". Raises TransferError if there are none.
    """
    ports = active_ports()
    chosen = os.environ.get("UCX_NET_DEVICES", "all")
    return chosen if chosen != "all" else ",".join(port.replace("/", ":") for port in ports)


class RdmaEvidence:
    """The producer's evidence: its active ports."""

    def __init__(self, pool: PagePool, scratch: PagePool) -> None:
        """Raises TransferError if no port is active."""
        self._ports = RdmaPorts(active_ports())

    def describe(self, metadata: bytes) -> bytes:
        return msgspec.msgpack.encode(self._ports)


class RdmaPath:
    """The consumer's end of the path. The first read proves it."""

    path = "rdma"

    def __init__(self, description: bytes, metadata: bytes, pool: PagePool) -> None:
        """Raises TransferError if no port is active."""
        parse_description("rdma", description, RdmaPorts)
        active_ports()

    def close(self) -> None:
        """No-op: no resource is held."""

"""Which network ports of this machine can do RDMA, which of them agents may use, and what two
ends make of it.

There is nothing to compare between two hosts before they talk. The proof of this path is that its
agents have no other: without a transport for sockets, a read over them is RDMA or fails.
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
    """The owner's, for messages: UCX finds out which of them reach each other."""

    ports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=256)]


def active_ports() -> tuple[str, ...]:
    """Such as ("mlx5_0/1",). Raises TransferError where there is none."""
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
    """For UCX_NET_DEVICES: what the user has chosen, or else every active port, such as
    "mlx5_0:1,mlx5_1:1". Raises TransferError where there is none."""
    ports = active_ports()
    chosen = os.environ.get("UCX_NET_DEVICES", "all")
    return chosen if chosen != "all" else ",".join(port.replace("/", ":") for port in ports)


class RdmaEvidence:
    """An owner's."""

    def __init__(self, pool: PagePool, scratch: PagePool) -> None:
        """Raises TransferError where there is no port."""
        self._ports = RdmaPorts(active_ports())

    def tell(self, metadata: bytes) -> bytes:
        return msgspec.msgpack.encode(self._ports)


class RdmaPath:
    """A reader's. Nothing is proved before the agents meet."""

    path = "rdma"

    def __init__(self, told: bytes, metadata: bytes, pool: PagePool) -> None:
        """Raises TransferError where there is no port."""
        parse_description("rdma", told, RdmaPorts)
        active_ports()

    def close(self) -> None:
        """Nothing to do: it holds nothing."""

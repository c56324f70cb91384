"""Rendezvous of ranks for torch.distributed: its store and its network interface.

The connections are not authenticated. On one host they use a private directory and loopback. On
several hosts they use a store on the first host and an interface of the trusted network.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch import distributed

from common.config import ParallelConfig
from common.process.network import OwnAddress, own_address
from common.rpc.channels import join_address

NETWORK = "engine.parallel.trusted_network"

_api: Any = distributed  # its stores have no annotations


class Meeting(Protocol):
    """The rendezvous of the ranks of a group."""

    @property
    def interface(self) -> OwnAddress:
        """Return the address and the network interface of connections between ranks."""
        ...

    def store(self, name: str, size: int) -> Any:
        """Return the store of a group. No other group of the node uses it.

        Args:
            size: number of ranks of the group.
        """
        ...


class LoopbackMeeting:
    """The rendezvous of ranks on one host.

    Args:
        directory: readable only by this user, without files of these groups.
    """

    interface = OwnAddress("127.0.0.1", "lo")

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self, name: str, size: int) -> Any:
        return _api.FileStore(str(self._directory / name), size)


class NetworkMeeting:
    """The rendezvous of ranks on several hosts.

    Args:
        interface: interface of this host in the trusted network.
    """

    def __init__(self, interface: OwnAddress, store: Any) -> None:
        self.interface = interface
        self._store = store
        # NCCL has no other option for this. On several hosts, it must use no other network.
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface.interface}"

    @classmethod
    def leading(cls, config: ParallelConfig) -> tuple["NetworkMeeting", str]:
        """Open the store on the first host. Return the rendezvous and the address of the store.

        Raises:
            ConfigError: this host has no address in the trusted network.
        """
        interface = _interface(config)
        family = socket.AF_INET6 if ":" in interface.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # Without this, the store would listen on all addresses.
            listener.bind((interface.host, 0))
            port = listener.getsockname()[1]
            listener.listen()
            store = _tcp_store(config, interface.host, port, listener.detach())
        return cls(interface, store), join_address(interface.host, port)

    @classmethod
    def following(cls, config: ParallelConfig, address: str) -> "NetworkMeeting":
        """Connect to the store. Raises ConfigError as `leading`."""
        host, _, port = address.rpartition(":")
        return cls(_interface(config), _tcp_store(config, host.strip("[]"), int(port), None))

    def store(self, name: str, size: int) -> Any:
        return _api.PrefixStore(name, self._store)


def meeting_of(config: ParallelConfig, store: str) -> Meeting:
    """Return the rendezvous of a follower.

    Args:
        store: see StartRank.
    """
    if config.hosts == 1:
        return LoopbackMeeting(Path(store))
    return NetworkMeeting.following(config, store)


def _interface(config: ParallelConfig) -> OwnAddress:
    assert config.trusted_network is not None  # required with several hosts
    return own_address(config.trusted_network, NETWORK)


def _tcp_store(config: ParallelConfig, host: str, port: int, listener: int | None) -> Any:
    """Open or connect to a TCP store. `listener`: descriptor that the store then owns. None: it is
    elsewhere."""
    return _api.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=config.collective_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )

"""This machine's address in a network, and its interface."""

import array
import fcntl
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError

_SIOCGIFCONF = 0x8912
_MOST_ADDRESSES = 1024
_ENTRY = struct.Struct("16s2xH4s16x")  # struct ifreq with an IPv4 address: name, port, address
_IPV6 = Path("/proc/net/if_inet6")


class OwnAddress(NamedTuple):
    """An address of this machine, and the name of its interface."""

    host: str
    interface: str


def own_address(network: str, setting: str) -> OwnAddress:
    """Return the first address of this machine in a network.

    Args:
        network: in CIDR notation.
    Raises:
        ConfigError: this machine has no address in the network.
    """
    wanted = ip_network(network)
    found = list(_addresses())
    for each in found:
        if ip_address(each.host) in wanted:
            return each
    here = ", ".join(each.host for each in found)
    raise ConfigError(f"{setting}: no address of this host is in {network}, it has {here}")


def _addresses() -> Iterator[OwnAddress]:
    found = array.array("B", bytes(_MOST_ADDRESSES * _ENTRY.size))
    address, num_bytes = found.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("ixxxxP", num_bytes, address))
    (num_bytes,) = struct.unpack_from("i", answer)
    for name, _, host in _ENTRY.iter_unpack(found[:num_bytes]):
        yield OwnAddress(socket.inet_ntoa(host), name.rstrip(b"\0").decode())
    if _IPV6.exists():
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            yield OwnAddress(str(IPv6Address(int(digits, 16))), name)

"""Whoever asks: a key, or an address where there are no keys."""

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from api.auth.api_keys import KeyLimits
from api.auth.usage import Usage

_NO_LIMITS = KeyLimits()
# Of IPv6 a customer has at least so much, and could call from each address of it.
_IPV6_NETWORK_BITS = 64
_REMEMBERED = 4096  # addresses: reading one takes ten times as long as finding it


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """
    Attributes:
        name: one client has one; what is shared out is shared out over names.
        weight: its share where others ask too.
        namespaces_of: whose the namespaces of its prompts are; "": everybody's.
        priority: the highest that its requests may have, and have unless they ask for less; None:
            the router's own.
    """

    name: str
    usage: Usage
    limits: KeyLimits = _NO_LIMITS
    weight: float = 1.0
    operator: bool = False
    namespaces_of: str = ""
    priority: int | None = None

    @property
    def number(self) -> int:
        """The number by which nodes know it, alike on every router."""
        return xxh3_64_intdigest(self.name.encode()) or 1


@lru_cache(maxsize=_REMEMBERED)
def by_address(address: str) -> Client:
    """For an IP address, or whatever else tells where a client calls from."""
    return Client(network_of(address), Usage(_NO_LIMITS))


@lru_cache(maxsize=_REMEMBERED)
def network_of(address: str) -> str:
    """The addresses that one client is taken to have."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))

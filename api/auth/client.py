"""A client: an API key, or an IP address if there are no keys."""

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from api.auth.api_keys import KeyLimits
from api.auth.usage import KeyUsage

_NO_LIMITS = KeyLimits()
# An IPv6 customer has at least a /64 network and could call from each of its addresses.
_IPV6_NETWORK_BITS = 64
_REMEMBERED = 4096  # addresses: parsing one takes ten times as long as a cache hit


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """A client and its limits.

    Attributes:
        name: unique by client. Capacity is shared between names.
        weight: its share while other clients have requests too.
        namespaces_of: the owner of the namespaces of its prompts. "": shared by all clients.
        priority: highest priority of its requests, and their default. None: the router's own.
    """

    name: str
    usage: KeyUsage
    limits: KeyLimits = _NO_LIMITS
    weight: float = 1.0
    operator: bool = False
    namespaces_of: str = ""
    priority: int | None = None

    @property
    def number(self) -> int:
        """Return the number by which nodes know the client, equal on every router."""
        return xxh3_64_intdigest(self.name.encode()) or 1


@lru_cache(maxsize=_REMEMBERED)
def by_address(address: str) -> Client:
    """Return the client for an IP address, or for any other text that identifies the caller."""
    return Client(network_of(address), KeyUsage(_NO_LIMITS))


@lru_cache(maxsize=_REMEMBERED)
def network_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address or an IPv6 /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))

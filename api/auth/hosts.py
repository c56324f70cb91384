"""Host names by which HTTP clients may call this host, as a defence against DNS rebinding.

A page of any web site can make the visitor's browser call services on the visitor's machine. The
page can read the response if the site's DNS name has been changed to an address of that machine.
The browser still sends the site's name in Host, and a page cannot change that header.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

from common.identity.program import is_loopback

_LOCALHOST = "localhost"
_REMEMBERED = 256  # hosts as sent: nearly all requests send the same few


class AllowedHosts:
    def __init__(self, listens_on: str, allowed: Sequence[str]) -> None:
        """
        Args:
            listens_on: hosts are checked if this is loopback or `allowed` is not empty. Elsewhere
                browsers may use any name of the machine, and not all names are known.
            allowed: further names and addresses, in lower case.
        """
        self._checks = bool(allowed) or is_loopback(listens_on)
        self._allowed = frozenset({_LOCALHOST, listens_on.lower(), *allowed})
        self.refusal = lru_cache(maxsize=_REMEMBERED)(self._refusal)

    def _refusal(self, host: str) -> str | None:
        """Return None if a host is allowed, else a sentence.

        Args:
            host: the header's value. "" is always allowed, because no browser sends it.
        """
        if not self._checks or not host:
            return None
        name = _without_port(host.lower())
        if name.strip("[]") in self._allowed or name in self._allowed or _is_own(name):
            return None
        return f"host name {name[:256]!r} is not allowed; add it with --allowed-hosts"


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host


def _is_own(name: str) -> bool:
    """Return whether a name is local: browsers never ask DNS for such names."""
    if name.endswith(f".{_LOCALHOST}"):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

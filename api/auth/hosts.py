"""Which names HTTP clients may call this host by: none that somebody else's DNS can point here.

A page of any web site may make its visitor's browser ask whatever listens on his own machine, and
reads the answer if the site's name has meanwhile become an address of that machine (DNS
rebinding). The browser then says the site's name in Host, and cannot be made to say another.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

from common.identity.exposure import is_loopback

_LOCALHOST = "localhost"
_REMEMBERED = 256  # hosts as they were sent: nearly all requests send the same few


class HostCheck:
    def __init__(self, listens_on: str, allowed: Sequence[str]) -> None:
        """
        Args:
            listens_on: where that is loopback, or `allowed` is not empty, hosts are checked.
                Elsewhere browsers reach it by any name of the machine, and nobody knows them all.
            allowed: further names and addresses, in lower case.
        """
        self._checks = bool(allowed) or is_loopback(listens_on)
        self._allowed = frozenset({_LOCALHOST, listens_on.lower(), *allowed})
        self.refusal = lru_cache(maxsize=_REMEMBERED)(self._refusal)

    def _refusal(self, host: str) -> str | None:
        """
        Args:
            host: the header's value; "", which no browser sends, is anybody's.
        Returns:
            None: it is allowed; else a sentence.
        """
        if not self._checks or not host:
            return None
        name = _without_port(host.lower())
        if name.strip("[]") in self._allowed or name in self._allowed or _is_own(name):
            return None
        return f"this router is not called {name[:256]!r}; --allowed-hosts can tell it that it is"


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host


def _is_own(name: str) -> bool:
    """Browsers never ask DNS for these."""
    if name.endswith(f".{_LOCALHOST}"):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

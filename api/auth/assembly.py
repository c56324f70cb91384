"""CORS, permitted host names, and the construction of client authentication and limits."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from api.auth.guard import ApiKeyGuard, ApiKeys, IsOperator, OperatorCheck
from common.config import RouterConfig
from common.identity.guard import AuthRejection
from common.identity.program import is_loopback
from common.identity.secret import SecretStore, keyrings
from common.logs import kv
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

Headers = tuple[tuple[str, str], ...]

_PATHS = "/v1/"
_NAMES = re.compile(r"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
_MAX_NAMES_CHARACTERS = 2048
_EXPOSED = ", ".join(
    (
        "x-request-id",
        "baton-request-id",
        "retry-after",
        *(
            f"x-ratelimit-{number}-{what}"
            for what in ("requests", "tokens")
            for number in ("limit", "remaining", "reset")
        ),
    )
)
_KEPT_S = 600  # how long a browser caches the preflight response


# CORS: web sites whose pages may call the API from a browser.
#
# Only the headers that OpenAI's clients need are exposed, under /v1. Clients are never identified
# by cookies, so browser credentials are never allowed, for any origin.
class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """
        Args:
            origins: scheme://host[:port] each, or "*" for all. Empty: no page of another origin.
        """
        self._origins = frozenset(origins)

    def headers(self, path: str, origin: str) -> Headers:
        """Return extra response headers for a page of `origin`.

        Empty if it may not read the response.
        """
        if not path.startswith(_PATHS) or not self._origins:
            return ()
        vary = () if "*" in self._origins else (("vary", "origin"),)
        if not self._allows(origin):
            return vary
        allowed = "*" if "*" in self._origins else origin
        return (
            ("access-control-allow-origin", allowed),
            ("access-control-expose-headers", _EXPOSED),
            *vary,
        )

    def preflight(self, path: str, origin: str, wanted: str) -> Headers:
        """Return extra headers of a preflight response. Empty if the page may not send the request.

        Args:
            wanted: the headers that the page would send.
        """
        if not path.startswith(_PATHS) or not self._allows(origin):
            return ()
        named = len(wanted) <= _MAX_NAMES_CHARACTERS and _NAMES.fullmatch(wanted)
        return (
            ("access-control-allow-methods", "GET, POST"),
            *((("access-control-allow-headers", wanted),) if named else ()),
            ("access-control-max-age", str(_KEPT_S)),
        )

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._origins or origin in self._origins)


_LOCALHOST = "localhost"
_REMEMBERED = 256  # hosts as sent: nearly all requests send the same few


# Host names by which HTTP clients may call this host, as a defence against DNS rebinding.
#
# A page of any web site can make the visitor's browser call services on the visitor's machine. The
# page can read the response if the site's DNS name has been changed to an address of that machine.
# The browser still sends the site's name in Host, and a page cannot change that header.
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


@dataclass(frozen=True, slots=True)
class Clients:
    """Authentication and limits of clients.

    Attributes:
        has_secret: whether the router has the cluster secret.
    """

    guard: ApiKeyGuard
    keyring: ApiKeys | None
    hosts: AllowedHosts
    cors: Cors
    has_secret: bool

    async def keep_up(self) -> None:
        """Watch the file of keys, if there is one. Never returns."""
        if self.keyring is not None:
            await self.keyring.watch()


def make_clients(config: RouterConfig, metrics: RouterMetrics) -> Clients:
    """Make the guard, keyring, host check and CORS rules.

    Raises:
        ConfigError: the file of API keys, or of the cluster secret, cannot be used.
    """
    host = config.server.host
    here_only = is_loopback(host)
    file = config.clients.api_keys
    keyring = ApiKeys(file, salt_by_key=config.clients.isolate_cache_by_key) if file else None
    if keyring is not None:
        metrics.keys_from(keyring.usage)
    elif not here_only:
        log.warning("clients need no API key: --api-keys is not set %s", kv(host=host))
    held = keyrings(config.server.secret_file, "router")
    return Clients(
        guard=ApiKeyGuard(
            keyring,
            _is_operator(held),
            metrics,
            operators_prove=not (here_only or config.server.insecure),
            has_secret=held is not None,
        ),
        keyring=keyring,
        hosts=AllowedHosts(host, config.clients.allowed_hosts),
        cors=Cors(config.clients.cors_origins),
        has_secret=held is not None,
    )


def _is_operator(held: SecretStore | None) -> IsOperator:
    if held is None:
        return lambda shown: False
    operator = OperatorCheck(held)

    def is_operator(shown: str) -> bool:
        try:
            operator.check(shown)
        except AuthRejection:
            return False
        return True

    return is_operator

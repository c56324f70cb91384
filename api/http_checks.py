"""Access rules, host names and CORS: checks of every HTTP request before its body is read.

The order matters: a caller with a foreign host name must not learn anything else.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web

from api.admin import engines, requests_endpoint
from api.admin.router_state import METRICS_PATH
from api.auth.client import Client
from api.auth.guard import Access, ApiKeyGuard
from api.dialect import problems
from api.dialect.problems import ANTHROPIC, OPENAI, ApiError
from api.http.acceptor import HttpPeer
from api.http.messages import Check, HttpRequest, whole
from common.errors import RateLimited, ServingError
from common.identity.program import is_loopback
from router.metrics import RouterMetrics

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


# Only the headers that OpenAI's clients need are exposed, under /v1. Clients are never identified
# by cookies, so browser credentials are not allowed for any origin. An origin is
# scheme://host[:port], or "*" for all.
class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, path: str, origin: str) -> Headers:
        """Return CORS headers for a page of `origin`. Empty if it may not read the response."""
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

    def preflight(self, path: str, origin: str, header_names: str) -> Headers:
        """Return CORS headers of a preflight response. Empty if the page may not send the request.

        Args:
            header_names: names of the headers that the page would send.
        """
        if not path.startswith(_PATHS) or not self._allows(origin):
            return ()
        named = len(header_names) <= _MAX_NAMES_CHARACTERS and _NAMES.fullmatch(header_names)
        return (
            ("access-control-allow-methods", "GET, POST"),
            *((("access-control-allow-headers", header_names),) if named else ()),
            ("access-control-max-age", str(_KEPT_S)),
        )

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._origins or origin in self._origins)


_LOCALHOST = "localhost"
_REMEMBERED = 256  # hosts in the cache: nearly all requests send the same few


# A page of any web site can make the visitor's browser call services on the visitor's machine. If
# the site's DNS name is changed to an address of that machine (DNS rebinding), the page can read
# the response. The browser still sends the site's name in Host, and a page cannot change that
# header.
class AllowedHosts:
    """Check of a request's Host header.

    Args:
        listens_on: hosts are checked if this is loopback or `allowed` is not empty. On other
            addresses, browsers may use any name of the machine, and not all names are known.
        allowed: further names and addresses, in lower case.
    """

    def __init__(self, listens_on: str, allowed: Sequence[str]) -> None:
        self._checks = bool(allowed) or is_loopback(listens_on)
        self._allowed = frozenset({_LOCALHOST, listens_on.lower(), *allowed})
        self.refusal = lru_cache(maxsize=_REMEMBERED)(self._refusal)

    def _refusal(self, host: str) -> str | None:
        """Return None if a host is allowed, else the error message.

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


# A method or path without an entry is rejected for every caller, and the router does not start if
# it serves one.
def _all(access: Access, *names: str) -> Mapping[str, Access]:
    return dict.fromkeys(names, access)


def _methods(names: str) -> Sequence[str]:
    """Return paths of methods of the Router service, whose names are separated by spaces."""
    return [f"/baton.v1.Router/{name}" for name in names.split()]


METHODS: Mapping[str, Access] = {
    **_all(
        "client",
        *_methods("Generate Embed Score ScoreTokens Tokenize Detokenize GetModel"),
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ),
    **_all("operator", *_methods("GetCluster Explain")),
    **_all(
        "commander",
        *_methods("Drain Move ReportPlan LoadAdapter UnloadAdapter Pause Continue UpdateWeights"),
        *_methods("FlushCache ReleaseMemory ResumeMemory StartProfile StopProfile"),
    ),
}

PATHS: Mapping[str, Access] = {
    **_all("public", "/", "/health", "/ready"),
    **_all(
        "client",
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank"),
        *("/v1/models", "/version", "/openapi.json"),
        *("/get_model_info", "/model_info", "/get_server_info", "/server_info"),
    ),
    **_all("operator", "/cluster", requests_endpoint.PATH, METRICS_PATH),
    **_all("commander", *engines.COMMANDS, *engines.ADAPTER_COMMANDS),
}
# Rules for all other paths that begin with one of these prefixes.
PATHS_BELOW: Mapping[str, Access] = {
    "/page/": "public",
    "/v1/models/": "client",
    f"{requests_endpoint.PATH}/": "operator",
}


def of_path(path: str) -> Access | None:
    """Return the access rule of a path, or None if it has none."""
    below = (access for start, access in PATHS_BELOW.items() if path.startswith(start))
    return PATHS.get(path) or next(below, None)


def check_paths(served: Iterable[str]) -> None:
    """Raise KeyError for a path without an access rule."""
    for path in served:
        if of_path(path) is None:
            raise KeyError(path)


_ANTHROPIC_BELOW = "/v1/messages"


class HttpChecks:
    """Runs the checks of HTTP requests. For one event loop."""

    def __init__(
        self, guard: ApiKeyGuard, hosts: AllowedHosts, cors: Cors, metrics: RouterMetrics
    ) -> None:
        self._guard = guard
        self._hosts = hosts
        self._cors = cors
        self._metrics = metrics
        self._connections = KeyConnections()
        self.in_order: Sequence[Check] = (self._host, self._preflight, self._access)

    def begin(self, request: HttpRequest, num_requests: int) -> Client:
        """Count generation requests that arrived together, and return their client.

        Call it before any work on them.

        Raises:
            Unauthenticated: the key has been removed in the meantime.
            RateLimited, InvalidRequest: see KeyUsage.begin.
        """
        client = self._guard.identify("client", _authorization(request), request.peer.host)
        self._guard.begin(client, num_requests)
        return client

    def headers(self, request: HttpRequest) -> Headers:
        return self._cors.headers(request.route, request.header("origin"))

    def closed(self, peer: HttpPeer) -> None:
        self._connections.closed(peer)

    def _host(self, request: HttpRequest) -> web.Response | None:
        sentence = self._hosts.refusal(request.header("host"))
        if sentence is None:
            return None
        self._metrics.auth_rejected("host")
        return ApiError(421, sentence).response()

    def _preflight(self, request: HttpRequest) -> web.Response | None:
        if request.method != "OPTIONS" or not request.header("access-control-request-method"):
            return None
        header_names = request.header("access-control-request-headers")
        headers = self._cors.preflight(request.route, request.header("origin"), header_names)
        return whole(200, b"", headers=headers) if headers else None

    def _access(self, request: HttpRequest) -> web.Response | None:
        access = of_path(request.route)
        if access == "public":
            return None
        limits: Iterable[tuple[str, str]] = ()
        try:
            shown = _authorization(request)
            client = self._guard.identify(access or "client", shown, request.peer.host)
            limits = client.usage.headers()
            self._admit(client, request.peer)
            if request.method == "POST":
                self._guard.begin(client, 0)
        except ServingError as error:
            words = ANTHROPIC if request.route.startswith(_ANTHROPIC_BELOW) else OPENAI
            return problems.of_error(error, {}).in_words(words).response(limits)
        if access is None:
            return ApiError(404, f"no such path: {request.route}").response()
        return None

    def _admit(self, client: Client, connection: HttpPeer) -> None:
        """Count the connection for its client. Raise RateLimited if the key has too many."""
        try:
            self._connections.admit(client, connection)
        except RateLimited:
            self._metrics.rejected("limited")
            raise


def _authorization(request: HttpRequest) -> str:
    """Return the request's authorization. Anthropic's clients send only a key, in x-api-key."""
    if shown := request.header("authorization"):
        return shown
    key = request.header("x-api-key")
    return f"Bearer {key}" if key else ""


class KeyConnections:
    """Counts open connections by API key. For one event loop."""

    def __init__(self) -> None:
        self._shown: dict[HttpPeer, set[str]] = {}  # names of clients, by connection
        self._open: Counter[str] = Counter()  # number of connections, by name of client

    def admit(self, client: Client, connection: HttpPeer) -> None:
        """Count a connection for a client.

        Raises:
            RateLimited: the client has as many other open connections as allowed.
        """
        allowed, shown = client.usage.limits.connections, self._shown.get(connection, set())
        if allowed is None or client.name in shown:
            return
        if self._open[client.name] >= allowed:
            client.usage.refused()
            raise RateLimited(f"this key has {allowed} open connections, which is its limit")
        self._shown[connection] = {*shown, client.name}
        self._open[client.name] += 1

    def closed(self, connection: HttpPeer) -> None:
        for name in self._shown.pop(connection, ()):
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

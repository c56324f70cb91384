"""CORS: web sites whose pages may call the API from a browser.

Only the headers that OpenAI's clients need are exposed, under /v1. Clients are never identified by
cookies, so browser credentials are never allowed, for any origin.
"""

import re
from collections.abc import Sequence

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

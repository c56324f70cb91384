"""Which web sites' pages may call the API from a browser, in the browser's own terms (CORS).

Only what OpenAI's clients need is given away, under /v1. Nobody here knows a client by a cookie, so
credentials of the browser's are never asked for, whatever the origin.
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
_KEPT_S = 600  # a browser's memory of what it was told


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """
        Args:
            origins: scheme://host[:port] each, or "*" for all; none: no page of another origin.
        """
        self._origins = frozenset(origins)

    def headers(self, path: str, origin: str) -> Headers:
        """What an answer to a page of `origin` has, besides; nothing where it may not read it."""
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
        """What a browser that asks before it sends is told besides; nothing where it may not send.

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

"""Static files of the status page, with headers that forbid browsers to load anything else."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from api.http.messages import Handler, HttpRequest, whole

DIRECTORY = Path(__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The browser loads and runs only these files and does not convert text to HTML. This protects
# against malicious text in responses, addresses and request names.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    ("cache-control", "no-cache"),  # cached, but revalidated each time: an ETag is cheap
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
)


class PageFile:
    """HTTP handler for one file, which the constructor reads."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._kind = KINDS[path.suffix]
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    async def __call__(self, request: HttpRequest) -> web.Response:
        given = request.header("if-none-match").split(",")
        known = {tag.strip().removeprefix("W/") for tag in given}
        status = 304 if self._etag in known else 200
        return whole(status, self._content, self._kind, (("etag", self._etag), *_HEADERS))


def routes() -> Mapping[str, Mapping[str, Handler]]:
    """Return handlers by path and method: index.html at /, every other file under /page/."""
    files = {
        f"/page/{path.name}": {"GET": PageFile(path)}
        for path in DIRECTORY.iterdir()
        if path.suffix in KINDS
    }
    index = files.pop("/page/index.html")
    return {"/": index, **files}

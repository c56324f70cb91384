"""Gives the page's files to browsers, and tells them to load nothing from anywhere else."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from api.http.answers import whole
from api.http.request import Handler, Request

DIRECTORY = Path(__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Whatever is in an answer, an address or a request's name: the browser runs and loads nothing
# that is not one of these files, and refuses to make HTML of a text.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    ("cache-control", "no-cache"),  # kept, but asked for again each time: an ETag costs little
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
)


class PageFile:
    """A handler of HTTP requests for one file, which is read once, now."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._kind = KINDS[path.suffix]
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'

    async def __call__(self, request: Request) -> web.Response:
        given = request.header("if-none-match").split(",")
        known = {tag.strip().removeprefix("W/") for tag in given}
        status = 304 if self._etag in known else 200
        return whole(status, self._content, self._kind, (("etag", self._etag), *_HEADERS))


def routes() -> Mapping[str, Mapping[str, Handler]]:
    """By path, by method: index.html at /, every other file under /page/."""
    files = {
        f"/page/{path.name}": {"GET": PageFile(path)}
        for path in DIRECTORY.iterdir()
        if path.suffix in KINDS
    }
    index = files.pop("/page/index.html")
    return {"/": index, **files}

"""GET /requests, GET /requests/ID and GET /requests/ID/events: timelines and histories as JSON.

A client's own label for a request works like its id and finds the newest request with that label.
Each process of a router keeps its own requests and asks the other processes for theirs.
"""

from itertools import chain
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from api.admin.cluster_report import plain
from api.admin.explain import Explainer
from api.admin.request_json import details, summary
from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import HttpRequest
from api.requests.validation import MAX_LABEL_CHARACTERS
from common.errors import NodeUnavailable, NotFound
from router.timelines import TimelineRecorder
from router.workers.asking import SiblingProcesses, SiblingQuery, as_json

PATH = "/requests"
_ALL, _ONE = "/requests", "/request"  # paths between worker processes
_EVENTS = "/events"
_FRESH = (("cache-control", "no-store"),)

_Content = dict[str, Any]


class RequestsEndpoint:
    """HTTP handlers of the request timelines. For one event loop."""

    def __init__(
        self, timelines: TimelineRecorder, siblings: SiblingProcesses, explainer: Explainer
    ) -> None:
        self._timelines = timelines
        self._explainer = explainer
        self._lists: SiblingQuery[list[_Content]] = SiblingQuery(
            siblings, _ALL, self._own_list, as_json(list[_Content])
        )
        self._ones: SiblingQuery[_Content | None] = SiblingQuery(
            siblings, _ONE, self._own, as_json(_Content | None)
        )

    def _own_list(self) -> list[_Content]:
        return [summary(timeline) for timeline in self._timelines]

    def _own(self, name: str) -> _Content | None:
        timeline = self._timelines.find(name)
        return None if timeline is None else summary(timeline) | details(timeline)

    async def all(self, request: HttpRequest) -> web.Response:
        told = await self._lists.ask()
        lists = [self._own_list(), *told.answers]
        content = {
            "requests": sorted(chain.from_iterable(lists), key=_newest_first),
            "processes": told.num_asked + 1,
            "silent_processes": told.num_silent,
        }
        return whole(200, msgspec.json.encode(content), headers=_FRESH)

    async def below(self, request: HttpRequest) -> web.Response:
        """Serve one request by name. A slash within the name is percent-encoded in the path."""
        name = request.route.removeprefix(f"{PATH}/")
        asked = unquote(name.removesuffix(_EVENTS))
        if not 0 < len(asked) <= MAX_LABEL_CHARACTERS:  # other processes are not asked
            return _not_found(asked[:MAX_LABEL_CHARACTERS], 0).response()
        return await (self._explained if name.endswith(_EVENTS) else self._one)(asked)

    async def _explained(self, name: str) -> web.Response:
        try:
            told = await self._explainer.explain(name)
        except NotFound as unknown:
            return ApiError(404, str(unknown), code="request_not_found").response()
        except NodeUnavailable as silent:
            return ApiError(503, str(silent), code="request_not_found").response()
        return whole(200, msgspec.json.encode(plain(told)), headers=_FRESH)

    async def _one(self, name: str) -> web.Response:
        found, num_silent = self._own(name), 0
        if found is None or found["id"] != name:
            told = await self._ones.ask(name=name)
            found = _best(name, [one for one in (found, *told.answers) if one is not None])
            num_silent = told.num_silent
        if found is None:
            return _not_found(name, num_silent).response()
        return whole(200, msgspec.json.encode(found), headers=_FRESH)


def _newest_first(content: _Content) -> tuple[bool, float]:
    """Return the sort key: running requests first, then the others by their end, newest first."""
    if content["outcome"] == "live":
        return False, -content["arrived"]
    return True, -(content["arrived"] + content["seconds"])


def _best(name: str, found: list[_Content]) -> _Content | None:
    """Return the request with that id, else the newest request with that label."""
    return min(found, key=lambda one: (one["id"] != name, _newest_first(one)), default=None)


def _not_found(name: str, num_silent: int) -> ApiError:
    sentence = f"no request {name!r} is under way or among the last that ended"
    if num_silent:
        processes = "a process" if num_silent == 1 else f"{num_silent} processes"
        sentence += f", as far as is known: {processes} of this router did not answer"
        return ApiError(503, sentence, code="request_not_found")
    return ApiError(404, sentence, code="request_not_found")

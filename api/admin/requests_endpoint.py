"""GET /requests, /requests/ID and /requests/ID/events: timelines and histories of requests.

A request is found by its id or by the client's label, which finds the newest request with it. Each
worker process keeps its own requests and queries the other processes for theirs.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from api.admin.router_state import plain
from api.dialect.problems import ApiError
from api.http.messages import HttpRequest, whole
from api.requests.validation import MAX_LABEL_CHARACTERS
from common.errors import InvalidRequest, NodeUnavailable, NotFound
from common.requests.timeline import (
    HandoffSummary,
    Interval,
    TimelineEvent,
    TtftPhase,
    event_to_proto,
)
from protos.router_pb2 import ExplainedEvent, ExplainingNode, ExplainResponse
from router.cluster.cluster_state import DescribeResult, NodeDescriber
from router.record import AllTimelines, AttemptTimings, RequestTimeline
from router.workers import OtherProcesses, ProcessQuery


def events_of(timeline: RequestTimeline) -> list[TimelineEvent]:
    """Return the events of a request in its router process, in seconds since it arrived."""
    events = [
        TimelineEvent(event.at - timeline.arrived, event.what, event.detail)
        for event in _moments(timeline)
        if event.at
    ]
    return sorted(events, key=lambda event: event.at)


def _moments(timeline: RequestTimeline) -> Iterator[TimelineEvent]:
    """Yield the events at time.monotonic(). 0.0: has not happened yet."""
    yield TimelineEvent(timeline.arrived, "arrived")
    yield TimelineEvent(timeline.tokenized, "tokenized", f"{timeline.prompt_tokens} tokens")
    for number, one in enumerate(timeline.submissions):
        where = f"at decode node {one.decode}"
        if number:
            where += f", with {one.num_tokens} tokens already sent"
        yield TimelineEvent(one.submitted, "replayed" if number else "placed", where)
        yield TimelineEvent(one.lost, "failed", one.because)
    yield TimelineEvent(timeline.first_token, "first token", "sent to the client")
    yield TimelineEvent(
        timeline.last_token, "last token", f"{timeline.completion_tokens} tokens sent"
    )
    ended = f"{timeline.outcome}: {timeline.error}" if timeline.error else timeline.outcome
    yield TimelineEvent(timeline.ended, "ended", ended)


# Times are seconds since the request arrived at its router process. Neither prompt nor response
# text is included. docs/tracing.md defines the phases.
def summary(timeline: RequestTimeline) -> dict[str, Any]:
    last = timeline.submissions[-1] if timeline.submissions else None
    used = _used(last) if last else None
    return {
        "id": timeline.request_id,
        "label": timeline.label or None,
        "model": timeline.model,
        "outcome": timeline.outcome,
        "arrived": timeline.arrived_unix,
        "seconds": (timeline.ended or time.monotonic()) - timeline.arrived,
        "ttft_s": timeline.first_token - timeline.arrived if timeline.first_token else None,
        "last_token_s": timeline.last_token - timeline.arrived if timeline.last_token else None,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "completion_tokens": timeline.completion_tokens,
        "decode": last.decode if last else None,
        "prefill": used.prefill if used else None,
        "path": used.path if used else None,
        "replays": timeline.num_replays,
        "moves": timeline.num_moves,
        "trace_id": timeline.trace.trace_id or None,
    }


def details(timeline: RequestTimeline) -> dict[str, Any]:
    phases = [
        _phase("router", "", name, 0, start - timeline.arrived, end - timeline.arrived)
        for name, start, end in timeline.router_phases()
    ]
    marks = []
    attempts: list[dict[str, Any]] = []
    if timeline.first_token:
        marks.append(_mark("router", timeline.first_token - timeline.arrived))
    for submission in timeline.submissions:
        reported = submission.timeline
        zero = submission.begin(reported, timeline.first_token) - timeline.arrived
        phases += [_of_node(row, submission, reported.attempts, zero) for row in reported.intervals]
        attempts += [
            _attempt(number, one, submission) for number, one in enumerate(reported.attempts, 1)
        ]
        if reported.first_token is not None:
            marks.append(_mark("decode", zero + reported.first_token))
    parts = timeline.split() or ()
    return {
        "error": timeline.error,
        "ttft": [
            {"phase": phase.label, "seconds": seconds}
            for phase, seconds in zip(TtftPhase, parts, strict=False)
            if seconds
        ],
        "phases": sorted(phases, key=lambda phase: (phase["start_s"], phase["end_s"])),
        "attempts": attempts,
        "marks": marks,
    }


def _used(submission: AttemptTimings) -> HandoffSummary | None:
    """Return the completed hand-off whose KV the request used, if any."""
    held = [one for one in submission.timeline.attempts if one.outcome == "completed"]
    return held[-1] if held else None


def _of_node(
    row: Interval, submission: AttemptTimings, attempts: tuple[HandoffSummary, ...], zero: float
) -> dict[str, Any]:
    where, node = "decode", submission.decode
    if row.phase.on_prefill_node and row.attempt:
        where, node = "prefill", attempts[row.attempt - 1].prefill
    name = row.phase.name.lower()
    return _phase(where, node, name, row.attempt, zero + row.start, zero + row.end)


def _phase(
    where: str, node: str, name: str, attempt: int, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "where": where,
        "node": node,
        "phase": name,
        "attempt": attempt,
        "start_s": start_s,
        "end_s": end_s,
    }


def _mark(where: str, at_s: float) -> dict[str, Any]:
    return {"where": where, "mark": "first_token", "at_s": at_s}


def _attempt(number: int, attempt: HandoffSummary, submission: AttemptTimings) -> dict[str, Any]:
    return {
        "number": number,
        "node": submission.decode,
        "prefill": attempt.prefill,
        "path": attempt.path,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "pages": attempt.num_pages,
        "bytes": attempt.num_bytes,
        "chunks": attempt.num_chunks,
    }


_Content = dict[str, Any]

_ALL, _ONE = "/requests", "/request"  # paths between worker processes


class FoundRequest(msgspec.Struct, frozen=True):
    """One request in its router process, as sent to another worker process."""

    content: _Content  # of `summary` and `details`
    arrived: float  # time.monotonic(), which all processes of a host share
    events: list[TimelineEvent]


class RequestFinder:
    """Finds one request in any worker process. For one event loop."""

    def __init__(self, timelines: AllTimelines, other_processes: OtherProcesses) -> None:
        self._timelines = timelines
        self._query: ProcessQuery[FoundRequest | None] = ProcessQuery(
            other_processes, _ONE, self._own, FoundRequest | None
        )

    async def find(self, name: str) -> tuple[FoundRequest | None, int]:
        """Return a request, and the number of processes that did not respond.

        Args:
            name: a request id, or the client's label, which finds the newest request with it.
        """
        own = self._own(name)
        if own is not None and own.content["id"] == name:
            return own, 0
        others = await self._query.ask(name=name)
        found = [one for one in (own, *others.answers) if one is not None]
        newest = max(found, key=lambda one: (one.content["id"] == name, one.arrived), default=None)
        return newest, others.num_silent

    def _own(self, name: str) -> FoundRequest | None:
        timeline = self._timelines.find(name)
        if timeline is None:
            return None
        content = summary(timeline) | details(timeline)
        return FoundRequest(content, timeline.arrived, events_of(timeline))


# Clocks of different hosts are never compared. A node reports how long ago an event was, so its
# times are late by the network delay of its response.
class Explainer:
    """Collects a request's history from its router process and all nodes. For one event loop."""

    def __init__(self, finder: RequestFinder, nodes: NodeDescriber) -> None:
        self._finder = finder
        self._nodes = nodes

    async def explain(self, name: str) -> ExplainResponse:
        """Collect the history of one request within 4 s.

        Args:
            name: a request id, or the client's label, which finds the newest request with it.

        Raises:
            InvalidRequest: no request can have that name.
            NotFound: no process or node knows the request, or its history has been dropped.
            NodeUnavailable: the request was not found, but a worker process did not respond.
        """
        if not 0 < len(name) <= MAX_LABEL_CHARACTERS:
            raise InvalidRequest(
                f"name has {len(name)} characters, expected 1 to {MAX_LABEL_CHARACTERS}"
            )
        known, num_silent = await self._finder.find(name)
        said = await self._nodes.ask(known.content["id"] if known else name)
        if known is None and not any(one.flights.flights for one in said):
            raise (NodeUnavailable if num_silent else NotFound)(_sentence(name, said, num_silent))
        return _together(name, known, said)


# Fields of `summary` and `details` that ExplainResponse repeats.
_REPEATED = (
    "label",
    "outcome",
    "error",
    "seconds",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)


def _together(
    name: str, known: FoundRequest | None, said: Sequence[DescribeResult]
) -> ExplainResponse:
    began = [one.at - flight.began_ago_s for one in said for flight in one.flights.flights]
    zero = known.arrived if known else min(began)
    own = known.events if known else ()
    moments = [(event.at, "router", "", event) for event in own]
    for one in said:
        for flight in one.flights.flights:
            offset = one.at - flight.began_ago_s - zero
            moments += [
                (offset + event.at, one.role, one.address, event) for event in flight.events
            ]
    content: _Content = known.content if known else {"id": name}
    return ExplainResponse(
        request_id=content["id"],
        **{field: content.get(field) for field in _REPEATED},
        events=[
            ExplainedEvent(at_s=at, where=where, node=node, event=event_to_proto(event))
            for at, where, node, event in sorted(moments, key=lambda moment: moment[0])
        ],
        nodes=[
            ExplainingNode(
                role=one.role,
                address=one.address,
                parts=len(one.flights.flights),
                kept=one.flights.num_kept,
                problem=one.problem,
            )
            for one in said
        ],
    )


def _sentence(name: str, said: Sequence[DescribeResult], num_silent: int) -> str:
    kept = ", ".join(
        f"{one.role} {one.address} {one.problem or f'its last {one.flights.num_kept}'}"
        for one in said
    )
    sentence = f"request {name!r} is unknown or no longer stored"
    if num_silent:
        sentence += f"; {num_silent} processes of this router did not respond"
    return f"{sentence}; processes store: {kept or 'none, there is no node'}"


PATH = "/requests"
_EVENTS = "/events"
_FRESH = (("cache-control", "no-store"),)


class RequestsEndpoint:
    """HTTP handlers for request timelines. For one event loop."""

    def __init__(
        self,
        timelines: AllTimelines,
        other_processes: OtherProcesses,
        finder: RequestFinder,
        explainer: Explainer,
    ) -> None:
        self._timelines = timelines
        self._finder = finder
        self._explainer = explainer
        self._lists: ProcessQuery[list[_Content]] = ProcessQuery(
            other_processes, _ALL, self._own_list, list[_Content]
        )

    def _own_list(self) -> list[_Content]:
        return [summary(timeline) for timeline in self._timelines]

    async def all(self, request: HttpRequest) -> web.Response:
        replies = await self._lists.ask()
        lists = [self._own_list(), *replies.answers]
        content = {
            "requests": sorted(chain.from_iterable(lists), key=_newest_first),
            "processes": replies.num_others + 1,
            "silent_processes": replies.num_silent,
        }
        return whole(200, msgspec.json.encode(content), headers=_FRESH)

    async def below(self, request: HttpRequest) -> web.Response:
        """Serve one request by id or label. A slash in it is percent-encoded in the path."""
        path = request.route.removeprefix(f"{PATH}/")
        name = unquote(path.removesuffix(_EVENTS))
        if not 0 < len(name) <= MAX_LABEL_CHARACTERS:  # no request has such a name
            return _not_found(name[:MAX_LABEL_CHARACTERS], 0).response()
        return await (self._explained if path.endswith(_EVENTS) else self._one)(name)

    async def _explained(self, name: str) -> web.Response:
        try:
            history = await self._explainer.explain(name)
        except NotFound as unknown:
            return ApiError(404, str(unknown), code="request_not_found").response()
        except NodeUnavailable as silent:
            return ApiError(503, str(silent), code="request_not_found").response()
        return whole(200, msgspec.json.encode(plain(history)), headers=_FRESH)

    async def _one(self, name: str) -> web.Response:
        found, num_silent = await self._finder.find(name)
        if found is None:
            return _not_found(name, num_silent).response()
        return whole(200, msgspec.json.encode(found.content), headers=_FRESH)


def _newest_first(content: _Content) -> tuple[bool, float]:
    """Return the sort key: running requests first, then the others by their end, newest first."""
    if content["outcome"] == "live":
        return False, -content["arrived"]
    return True, -(content["arrived"] + content["seconds"])


def _not_found(name: str, num_silent: int) -> ApiError:
    sentence = f"no request {name!r} is running or among the last requests that ended"
    if num_silent:
        processes = "a process" if num_silent == 1 else f"{num_silent} processes"
        sentence += f" (incomplete: {processes} of this router did not respond)"
        return ApiError(503, sentence, code="request_not_found")
    return ApiError(404, sentence, code="request_not_found")

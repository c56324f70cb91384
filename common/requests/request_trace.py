"""Trace of one request at one process: a list of events in words, for people.

A timeline (timeline.py) has a fixed set of phases, for metrics and diagrams. A trace is for
reading. Data from peers is not trusted: it is limited to valid values.
"""

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import msgspec

from common.requests.timeline import MAX_TEXT
from protos import node_pb2, router_pb2

MAX_EVENTS = 256  # of one trace
MAX_FLIGHTS = 32  # traces of one request at one node
_MAX_WHAT = 32  # characters


class TimelineEvent(NamedTuple):
    at: float  # seconds since the request arrived there
    what: str
    detail: str = ""


class RequestTrace(msgspec.Struct, frozen=True, array_like=True):
    began_ago_s: float  # seconds from its arrival there to this report
    events: tuple[TimelineEvent, ...]  # ordered by time


class RequestTraces(msgspec.Struct, frozen=True, array_like=True):
    """Traces of one request at one node."""

    flights: tuple[RequestTrace, ...]
    num_kept: int  # ended requests that the node still remembers


def to_proto(flights: RequestTraces) -> node_pb2.ExplainHereResponse:
    return node_pb2.ExplainHereResponse(
        flights=[
            node_pb2.Flight(
                began_ago_s=flight.began_ago_s, events=[event_to_proto(e) for e in flight.events]
            )
            for flight in flights.flights
        ],
        kept=flights.num_kept,
    )


def event_to_proto(event: TimelineEvent) -> router_pb2.RequestEvent:
    return router_pb2.RequestEvent(at_s=event.at, what=event.what, detail=event.detail)


def from_proto(message: node_pb2.ExplainHereResponse) -> RequestTraces:
    """Parse traces, limited to valid values."""
    flights = (
        RequestTrace(one.began_ago_s, tuple(_events(one.events[:MAX_EVENTS])))
        for one in message.flights[:MAX_FLIGHTS]
        if isfinite(one.began_ago_s)
    )
    return RequestTraces(tuple(flights), message.kept)


def _events(told: Iterable[router_pb2.RequestEvent]) -> Iterable[TimelineEvent]:
    for event in told:
        if isfinite(event.at_s):
            yield TimelineEvent(event.at_s, event.what[:_MAX_WHAT], event.detail[:MAX_TEXT])

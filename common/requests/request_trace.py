"""What happened to one request on one program: a list of moments, in words, for people.

A timeline (timeline.py) is what metrics and drawings are made of, closed and counted; a flight is
read. What a peer says is never trusted: it is cut to what can be.
"""

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

import msgspec

from common.requests.timeline import MAX_TEXT
from protos import node_pb2, router_pb2

MAX_EVENTS = 256  # of one flight
MAX_FLIGHTS = 32  # of one request on one node
_MAX_WHAT = 32  # characters


class Event(NamedTuple):
    at: float  # seconds since the request arrived there
    what: str
    detail: str = ""


class Flight(msgspec.Struct, frozen=True, array_like=True):
    began_ago_s: float  # when it arrived there, before this was said
    events: tuple[Event, ...]  # by their moments


class Flights(msgspec.Struct, frozen=True, array_like=True):
    """What one node knows of one request."""

    flights: tuple[Flight, ...]
    num_kept: int  # requests that have ended and that are still known there


def to_proto(flights: Flights) -> node_pb2.ExplainHereResponse:
    return node_pb2.ExplainHereResponse(
        flights=[
            node_pb2.Flight(
                began_ago_s=flight.began_ago_s, events=[event_to_proto(e) for e in flight.events]
            )
            for flight in flights.flights
        ],
        kept=flights.num_kept,
    )


def event_to_proto(event: Event) -> router_pb2.RequestEvent:
    return router_pb2.RequestEvent(at_s=event.at, what=event.what, detail=event.detail)


def from_proto(message: node_pb2.ExplainHereResponse) -> Flights:
    """What of it can be true."""
    flights = (
        Flight(one.began_ago_s, tuple(_events(one.events[:MAX_EVENTS])))
        for one in message.flights[:MAX_FLIGHTS]
        if isfinite(one.began_ago_s)
    )
    return Flights(tuple(flights), message.kept)


def _events(told: Iterable[router_pb2.RequestEvent]) -> Iterable[Event]:
    for event in told:
        if isfinite(event.at_s):
            yield Event(event.at_s, event.what[:_MAX_WHAT], event.detail[:MAX_TEXT])

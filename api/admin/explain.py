"""The history of one request, from its router process and every node.

Clocks of different hosts are never compared. A node reports how long ago an event was, so its times
are late by the network delay of its response.
"""

import time
from collections.abc import Sequence

from api.requests.events import EventHistory, told
from api.requests.validation import MAX_LABEL_CHARACTERS
from common.errors import InvalidRequest, NodeUnavailable, NotFound
from common.requests.timeline import event_to_proto
from protos.router_pb2 import ExplainedEvent, ExplainingNode, ExplainResponse
from router.cluster.cluster_state import DescribeResult, NodeDescriber
from router.timelines import TimelineRecorder
from router.workers.asking import SiblingProcesses, SiblingQuery, as_json

_TOLD = "/told"  # path between worker processes


class Explainer:
    """Collector of request histories from all processes and nodes. For one event loop."""

    def __init__(
        self, timelines: TimelineRecorder, siblings: SiblingProcesses, nodes: NodeDescriber
    ) -> None:
        self._timelines = timelines
        self._nodes = nodes
        self._query: SiblingQuery[EventHistory | None] = SiblingQuery(
            siblings, _TOLD, self._own, as_json(EventHistory | None)
        )

    async def explain(self, name: str) -> ExplainResponse:
        """Collect the history of one request, within 4 s.

        Args:
            name: a request id, or the client's own label. A label finds the newest request that has
                it.

        Raises:
            InvalidRequest: no request can have that name.
            NotFound: no process or node knows the request, or its history has been dropped.
            NodeUnavailable: the request is unknown, but a process of this router did not respond.
        """
        if not 0 < len(name) <= MAX_LABEL_CHARACTERS:
            raise InvalidRequest(
                f"name has {len(name)} characters, 1 to {MAX_LABEL_CHARACTERS} can be"
            )
        known, num_silent = await self._find(name)
        said = await self._nodes.ask(known.request_id if known else name)
        if known is None and not any(one.flights.flights for one in said):
            raise (NodeUnavailable if num_silent else NotFound)(_sentence(name, said, num_silent))
        return _together(name, known, said)

    async def _find(self, name: str) -> tuple[EventHistory | None, int]:
        """Return the history, and the number of processes that did not respond."""
        own = self._own(name)
        if own is not None and own.request_id == name:
            return own, 0
        others = await self._query.ask(name=name)
        found = [one for one in (own, *others.answers) if one is not None]
        best = max(found, key=lambda one: (one.request_id == name, one.arrived), default=None)
        return best, others.num_silent

    def _own(self, name: str) -> EventHistory | None:
        timeline = self._timelines.find(name)
        return None if timeline is None else told(timeline)


def _together(
    name: str, known: EventHistory | None, said: Sequence[DescribeResult]
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
    answer = ExplainResponse(
        request_id=known.request_id if known else name,
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
    if known is not None:
        answer.label, answer.outcome, answer.error = known.label, known.outcome, known.error
        answer.seconds = (known.ended or time.monotonic()) - known.arrived
        answer.prompt_tokens, answer.cached_tokens = known.prompt_tokens, known.cached_tokens
        answer.completion_tokens = known.completion_tokens
    return answer


def _sentence(name: str, said: Sequence[DescribeResult], num_silent: int) -> str:
    kept = ", ".join(
        f"{one.role} {one.address} {one.problem or f'its last {one.flights.num_kept}'}"
        for one in said
    )
    sentence = f"request {name!r} is unknown or no longer stored"
    if num_silent:
        sentence += f"; {num_silent} processes of this router have not answered"
    return f"{sentence}; kept are the last that ended: {kept or 'no node is there'}"

"""Admission control of a decode node: the checks of a submission, the cheapest first.

Until all checks pass, a request acquires only resources that its end releases.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Collection
from functools import partial

from common.errors import InvalidRequest, NodeUnavailable, Overloaded, ServingError
from common.queueing import may_wait_s
from common.request import MAX_HINTS, PrefixHint
from decode_node.active_requests import ActiveRequests
from decode_node.queues import DecodeQueues
from decode_node.state import DecodeState
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from node.control.engine_control import EngineControl
from node.messages import Placement, SubmitRequest
from node.queues import RequestAdapters
from node.request_state import Claim, HeldBytes
from node.timings import RequestTimings

# Multiple of the queue limits that applies to replayed requests. Their clients already have tokens,
# and a failed node may replay all its requests here.
REPLAYS_TIMES = 2
WORTH_NAMING_TOKENS = 64  # shorter cached prefixes are not offered to other nodes
ENOUGH = 16  # below this number of responses, no duration is estimated
REMEMBERED = 64


class OutputLengthEstimate:
    """Estimates the time from the first to the last token, which a request's budget must cover.

    The output length is unknown and may be far below `max_tokens`. The estimate is the 25th
    percentile of the last responses, at most `max_tokens`, so a request rejected for lack of time
    would most likely have exceeded its budget. Engine thread only.
    """

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)  # tokens
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, num_tokens: int, seconds: float) -> None:
        """Record a response that was not cut short.

        Args:
            seconds: time from its first token to its last.
        """
        self._lengths.append(num_tokens)
        if num_tokens > 1:
            self._token_s.append(seconds / (num_tokens - 1))

    def seconds(self, max_tokens: int) -> float:
        """Return the expected seconds from the first to the last token. 0.0: unknown yet."""
        if len(self._token_s) < ENOUGH:
            return 0.0
        num_tokens = min(max_tokens, _quantile(self._lengths, 1, 4))
        # The median, so that a short stall of the node has no effect.
        return (num_tokens - 1) * _quantile(self._token_s, 1, 2)


def _quantile(values: Collection[float], part: int, parts: int) -> float:
    return sorted(values)[len(values) * part // parts]


class PrefixLocations:
    """Finds the nodes that hold part of a prompt: this node's cache and the router's hints. Engine
    thread only.

    Args:
        shares: whether nodes fetch prefixes from each other. If not, there are no hints.
    """

    def __init__(self, cache: PrefixCache, tiers: CacheTiers | None, *, shares: bool) -> None:
        self._cache = cache
        self._tiers = tiers
        self._shares = shares

    def hints(self, request: Request, placement: Placement) -> tuple[PrefixHint, ...]:
        """Return this node, if its cache has enough of the prompt, then the router's hints."""
        if not self._shares:
            return ()
        if not placement.own_address or len(request.token_ids) < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        wanted = request.token_ids, request.namespace
        match = None if self._tiers is None else self._tiers.match(*wanted)
        num_tokens = (
            self._cache.match(*wanted).num_tokens if match is None else len(match.token_ids)
        )
        if num_tokens < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        return (PrefixHint(placement.own_address, num_tokens), *placement.prefix_hints)[:MAX_HINTS]


class RequestAdmission:
    """Admission control of the decode node. Engine thread only."""

    def __init__(
        self,
        *,
        max_waiting: int,
        limits: RequestLimits,
        control: EngineControl,
        active: ActiveRequests,
        adapters: RequestAdapters,
        locations: PrefixLocations,
        queues: DecodeQueues,
    ) -> None:
        self._max_waiting = max_waiting
        self._limits = limits
        self._control = control
        self._active = active
        self._adapters = adapters
        self._locations = locations
        self._queues = queues
        self._keys = itertools.count(1)
        self._lengths = OutputLengthEstimate()
        self._held_bytes = HeldBytes(limits)

    def submit(self, message: SubmitRequest) -> None:
        """Admit a request and prepare it, or reject it."""
        state = self._create_state(message)
        try:
            self._admit(state)
            self._queues.preparing.put(state)
        except ServingError as error:
            state.close(error)

    def note_length(self, state: DecodeState, num_generated: int, now: float) -> None:
        """Record an ended response. num_generated: its tokens, 0 if it was cut short."""
        if num_generated and state.timings.first_token:
            self._lengths.ended(num_generated, now - state.timings.first_token)

    def _create_state(self, message: SubmitRequest) -> DecodeState:
        """Create the request's record and start its timings. The caller must report its end."""
        now, spec = time.monotonic(), message.spec
        request = Request.of(
            spec,
            key=next(self._keys),
            origin=(message.stream, message.number),
            deadline=now + message.remaining.budget_s,
            arrived=now,
            start_by=now + self._may_wait_s(message),
            weights=self._control.weights,
        )
        timings = RequestTimings(
            spec.request_id,
            spec.num_prompt,
            message.trace,
            message.received or now,
            now,
            num_generated=spec.num_generated,
        )
        return DecodeState(
            request=request,
            on_end=self._active.report_end,
            timings=timings,
            placement=message.placement,
            candidates=message.placement.prefill_addresses,
        )

    def _admit(self, state: DecodeState) -> None:
        """Admit a request. Its resources become claims.

        Raises:
            ServingError: the request is rejected.
        """
        request, placement = state.request, state.placement
        if self._active.get(state.origin) is not None:
            raise InvalidRequest(f"request {state.origin[1]} is already active on this stream")
        if self._control.draining:
            raise NodeUnavailable("this decode node is draining")
        times = REPLAYS_TIMES if request.spec.num_generated else 1
        num_waiting = self._queues.num_waiting
        if num_waiting >= times * self._max_waiting:
            raise Overloaded(f"the queue is full ({num_waiting} requests)")
        self._limits.check_request(request.spec)
        self._held_bytes.hold(state, times=times)
        if request.spec.adapter:
            self._adapters.hold(request)
            state.claims.add(Claim.ADAPTER, partial(self._adapters.release, state.key))
        if placement.move_from is None:
            state.prefix_hints = self._locations.hints(request, placement)
        self._active.add(state, times=times)

    def _may_wait_s(self, message: SubmitRequest) -> float:
        """Return the longest wait in seconds. Infinite for a continued response, because the client
        already has a part of it.
        """
        spec, remaining = message.spec, message.remaining
        if spec.num_generated:
            return math.inf
        work_s = spec.num_tokens * self._queues.scheduled.backlog.unit_s
        work_s += self._lengths.seconds(spec.sampling.max_tokens)
        return may_wait_s(remaining.queue_s, remaining.budget_s, work_s)

"""Computation of prompts before their Grant, while the node is otherwise idle.

A decode node opens a hand-off when a request arrives, and grants it when it has free pages. That
may take seconds. Meanwhile this node computes such prompts one at a time and leaves their KV in its
prefix cache. After the Grant, the prompt is scheduled normally and finds its KV there.

Such prompts hold no pages, so they never delay granted prompts: the cache may evict their KV, which
is then recomputed. Any other waiting prompt stops the current one after its chunk. The KV of
finished chunks stays in the cache.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from common.errors import ServingError
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.kv_cache.radix import PrefixCache
from engine.scheduler.scheduler import ChunkDone
from node.queues import RequestAdapters
from node.request_state import Claim, Ending, RequestStage, RequestState
from prefill_node.admission import PrefillQueues, PrefillState
from prefill_node.pooling import NO_TOKEN

WAIT_S = 0.02  # the Grant usually comes sooner, and saves one forward pass
_STOPPED = RequestEnd(FinishReason.ABORT, "other prompts are waiting, or its Grant has arrived")


@dataclass(slots=True, eq=False, kw_only=True)
class AheadPrompt(RequestState):
    """A prompt that is computed ahead."""

    handoff: PrefillState


class PrefillAhead:
    """Computes prompts ahead of their Grant, one at a time. Engine thread only.

    Args:
        is_coming: returns whether a hand-off, named by its key, waits for data of another node.
        keys: unused keys, see keys_of_others.
        max_tokens: limit of computed tokens that wait for their Grant. 0: nothing is computed
            ahead.
    Attributes:
        current: the prompt that is being computed.
        next_at: time at which an idle node must poll again, because the next hand-off has waited
            long enough by then.
        num_tokens: tokens computed ahead since the start.
    """

    def __init__(
        self,
        queues: PrefillQueues,
        *,
        cache: PrefixCache,
        adapters: RequestAdapters,
        is_coming: Callable[[int], bool],
        keys: Iterator[int],
        max_tokens: int,
    ) -> None:
        self._queues = queues
        self._scheduler = queues.scheduled.scheduler
        self._cache = cache
        self._adapters = adapters
        self._is_coming = is_coming
        self._keys = keys
        self._max_tokens = max_tokens
        self.current: AheadPrompt | None = None
        self._tried: dict[int, int] = {}  # key of a hand-off in the bootstrap queue -> tokens
        self.next_at = math.inf
        self.num_tokens = 0

    def find(self, request: Request) -> AheadPrompt | None:
        current = self.current
        return current if current is not None and current.key == request.key else None

    def poll(self, now: float) -> None:
        """Start the next prompt if the node is idle, or stop the current one if it is not. Need not
        be called without a current prompt and before a hand-off has waited WAIT_S.
        """
        self.next_at = math.inf
        if self.current is not None:
            if self.current.handoff.stage is not RequestStage.BOOTSTRAP or self._others_wait:
                self.stop()
        elif self._max_tokens and not self._has_work:
            self._start(now)

    def stop(self) -> None:
        """Stop the current prompt, at the end of its launched chunk if it has one."""
        if self.current is not None:
            assert self.current.queue is not None
            if self.current.queue.remove(self.current, _STOPPED):
                self.current.close(_STOPPED)

    def admitted(self, request: Request) -> None:
        """Record how much of the current prompt was cached. No effect for other requests."""
        prompt = self.find(request)
        if prompt is not None:
            handoff = prompt.handoff
            handoff.cached_before = min(handoff.cached_before, request.cached_tokens)

    def computed(self, chunk: ChunkDone) -> None:
        """Count the tokens of the current prompt. No effect for other requests."""
        if self.find(chunk.request) is not None:
            self.num_tokens += chunk.end - chunk.start

    @property
    def _has_work(self) -> bool:
        scheduler = self._scheduler
        return scheduler.has_work or scheduler.paused or self._queues.preparing.num_waiting > 0

    @property
    def _others_wait(self) -> bool:
        assert self.current is not None
        waits = self.current.stage is RequestStage.SCHEDULED and self.current.request.slot is None
        return self._scheduler.num_waiting > waits

    def _start(self, now: float) -> None:
        waiting = {state.key: state for state in self._queues.bootstrap}
        self._tried = {key: size for key, size in self._tried.items() if key in waiting}
        room = self._max_tokens - sum(self._tried.values())
        for key, state in waiting.items():
            request = state.request
            due = request.arrived + WAIT_S
            if due > now:
                self.next_at = due
                return  # the others have arrived later
            num_tokens = len(request.token_ids)
            if key in self._tried or num_tokens > room or not self._is_eligible(request):
                continue
            if self._is_cached(request):  # one comparison for each poll
                self._tried[key] = 0
                self.next_at = now
            else:
                self._begin(state, now)
            return

    def _is_eligible(self, request: Request) -> bool:
        """Return whether the prompt may use cached KV and does not wait for KV of another node."""
        return (
            len(request.reusable_tokens) == len(request.token_ids) - 1
            and not request.engine_crashes
            and not self._is_coming(request.key)
        )

    def _is_cached(self, request: Request) -> bool:
        """Return whether at most one page of the prompt is left to compute."""
        match = self._cache.match(request.reusable_tokens, request.namespace)
        return len(request.token_ids) - match.num_tokens <= self._cache.page_size

    def _begin(self, state: PrefillState, now: float) -> None:
        spec = replace(state.request.spec, sampling=NO_TOKEN, num_generated=0)
        request = Request.of(
            spec,
            key=next(self._keys),
            deadline=state.request.deadline,
            arrived=now,
            weights=state.request.weights,
        )
        prompt = AheadPrompt(request=request, on_end=self._ended, handoff=state)
        self.current = prompt
        try:
            if spec.adapter:
                self._adapters.hold(request)
                prompt.claims.add(Claim.ADAPTER, partial(self._adapters.release, request.key))
            self._queues.preparing.put(prompt)
        except ServingError as error:
            prompt.close(error)

    def _ended(self, prompt: AheadPrompt, ending: Ending) -> None:
        self.current = None
        if ending is not _STOPPED:
            self._tried[prompt.handoff.key] = len(prompt.request.token_ids)

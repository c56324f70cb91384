"""One request's life on this node, and what the scheduler needs to know of it."""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from grpc import StatusCode
from numpy.typing import NDArray

from common.priority import STEP_S, head_start_s
from common.request import RequestSpec
from common.requests.logprobs import Logprobs
from common.requests.namespace import SHARED, Namespace
from common.requests.pooling import Pooling
from common.requests.quarantine import TRIAL_TOKENS
from common.requests.sampling import SamplingParams
from common.requests.weights import UNNAMED, WeightsId, made_with

Ints = NDArray[np.int32]

MAX_ABSENCES = 16  # from the device, told of one request


class FinishReason(IntEnum):
    """The numbers of decode.proto."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    MOVED = 5


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request is over.

    Attributes:
        status: what its client is told; OK unless reason is ERROR.
        retry_after_s: when to come again, of one that a queue was too long for; else 0.0.
    """

    reason: FinishReason
    error: str = ""
    status: StatusCode = StatusCode.OK
    retry_after_s: float = 0.0


def out_of_time() -> Finish:
    """The end of a request whose total budget is spent."""
    sentence = "deadline: the total budget is spent"
    return Finish(FinishReason.ERROR, sentence, StatusCode.DEADLINE_EXCEEDED)


def waited_too_long(retry_after_s: float) -> Finish:
    """The end of a request whose turn has not come while it could still be answered in time."""
    sentence = "overloaded: its turn did not come within the time that it may wait"
    status = StatusCode.RESOURCE_EXHAUSTED
    return Finish(FinishReason.ERROR, sentence, status, max(retry_after_s, 1.0))


def moved() -> Finish:
    """The end, on this node, of a request that runs on another one."""
    return Finish(FinishReason.MOVED)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what has been generated from it. Engine thread only.

    While the request has a slot, its tokens are in the slot's row of the RequestTable and
    `token_ids` is what it came with; `RequestTable.tokens(slot)` has them all.
    """

    key: int  # this node's own number for it, new for every request
    origin: tuple[int, int]  # router stream and the router's number for it; (0, 0) on an owner
    spec: RequestSpec
    token_ids: Ints  # prompt, then tokens already generated
    num_prompt: int
    sampling: SamplingParams  # of the spec, except on a node that samples one token only
    deadline: float  # time.monotonic() by which it must have ended
    arrived: float  # time.monotonic()
    start_by: float = math.inf  # time.monotonic() by which its prompt's first forward must begin
    pooling: Pooling | None = None  # wanted in place of tokens: it ends with its prompt
    namespace: Namespace = SHARED  # of the prefix cache, in which its KV is found and left
    weights: WeightsId = UNNAMED  # that compute it
    given_by: list[int] = field(default_factory=list)  # nodes that KV of it was read from
    engine_deaths: int = 0  # engines that died with it aboard, see common/requests/quarantine.py
    alone_until: int = 0  # it shares no forward before it has so many tokens
    cached_tokens: int = 0  # prompt tokens whose KV was found in a cache
    brought: bool | None = None  # what a tier below has of it; False: that is on its way
    bringing: list[float] = field(default_factory=list)  # when that began, was over, began ...
    slot: int | None = field(default=None)
    match: Any = None  # features.matching.Match: made before it waits for anything else
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # as far as it is computed
    pooled: NDArray[np.float32] | None = None  # its vector, as far as it is computed
    to_finish: Finish | None = field(default=None)  # applied at the next result of its step
    admitted: float = 0.0  # time.monotonic() when its first forward was chosen
    away: list[float] = field(default_factory=list)  # when it left the device, came back, left ...
    preemptions: int = 0  # how often it left it for one that is more urgent
    away_s: float = 0.0  # in sum, of absences that are over

    @classmethod
    def of(
        cls,
        spec: RequestSpec,
        *,
        key: int,
        deadline: float,
        arrived: float,
        origin: tuple[int, int] = (0, 0),
        start_by: float = math.inf,
        weights: WeightsId = UNNAMED,
        pooling: Pooling | None = None,
    ) -> "Request":
        """Return a request as it arrives."""
        token_ids = np.frombuffer(spec.token_ids, np.int32)
        request = cls(
            key=key,
            origin=origin,
            spec=spec,
            token_ids=token_ids,
            num_prompt=spec.num_prompt,
            sampling=spec.sampling,
            deadline=deadline,
            arrived=arrived,
            start_by=start_by,
            pooling=pooling,
        )
        request.compute_with(weights)
        request.suspect_of(spec.engine_crashes)
        return request

    def compute_with(self, weights: WeightsId) -> None:
        """Take other weights. Not while it has KV."""
        self.weights, self.namespace = weights, made_with(self.spec.cache_namespace, weights)

    def leave_device(self, now: float) -> None:
        """Of too many absences the last ones become one."""
        if len(self.away) < 2 * MAX_ABSENCES:
            self.away.append(now)
        else:
            self.away.pop()

    def note_brought(self, now: float) -> None:
        """What was brought for it, if anything was, is there."""
        if len(self.bringing) % 2:
            self.bringing.append(now)
            del self.bringing[: -2 * MAX_ABSENCES]

    @property
    def is_away(self) -> bool:
        """Whether it has left the device, and not returned."""
        return len(self.away) % 2 == 1

    def return_to_device(self, now: float) -> None:
        self.away.append(now)

    def rank(self, away_s: float = 0.0) -> float:
        """How urgent it is by now, on the scale of priorities, in whole steps: whoever has a slot,
        and was away from the device, has waited so long in its favour.

        Args:
            away_s: of an absence that is not over.
        """
        return self.spec.priority + (self.away_s + away_s) // STEP_S

    def suspect_of(self, engine_deaths: int) -> None:
        """That many engines have died with it aboard; not to be called while it has a slot."""
        self.engine_deaths = engine_deaths
        self.alone_until = len(self.token_ids) + TRIAL_TOKENS if engine_deaths else 0

    @property
    def suspect(self) -> bool:
        """Whether it is to be computed alone. Of one with a slot, only Quarantine knows."""
        return len(self.token_ids) < self.alone_until

    @property
    def computed_whole(self) -> bool:
        """Whether something is wanted of tokens whose KV a cache may have."""
        if self.pooling is not None:
            return self.pooling.of_all
        return self.sampling.prompt_logprobs >= 0

    @property
    def place(self) -> float:
        """In line, where the least goes first: as they came, the urgent as if they had earlier."""
        return self.arrived - head_start_s(self.spec.priority)

    @property
    def due(self) -> float:
        """What may wait longest comes last; what may wait without end, as it came."""
        return self.start_by if self.start_by < math.inf else self.arrived

    @property
    def turn(self) -> float:
        """As it is due, the urgent as if they could wait less."""
        return self.due - head_start_s(self.spec.priority)

    @property
    def num_generated(self) -> int:
        """Of token_ids; what a slot has added since is not counted."""
        return len(self.token_ids) - self.num_prompt

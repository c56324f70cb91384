"""A request as the scheduler and the roles of a node see it, and the reasons for its end."""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from grpc import StatusCode
from numpy.typing import NDArray

from common.queueing import STEP_S, head_start_s
from common.request import QUARANTINE_TOKENS, RequestSpec
from common.requests.logprobs import Logprobs
from common.requests.namespace import SHARED, UNNAMED, Namespace, WeightsId, made_with
from common.requests.pooling import PoolingParams
from common.requests.sampling import SamplingParams

Ints = NDArray[np.int32]

MAX_ABSENCES = 16  # swap-outs recorded per request


class FinishReason(IntEnum):
    """Finish reasons, numbered as in decode.proto."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    MOVED = 5


class RequestEnd(msgspec.Struct, frozen=True):
    """The reason why a request ended.

    Attributes:
        status: reported to the client. OK unless reason is ERROR.
        retry_after_s: seconds after which to retry, if the queue was too long. Otherwise 0.0.
    """

    reason: FinishReason
    error: str = ""
    status: StatusCode = StatusCode.OK
    retry_after_s: float = 0.0


def out_of_time() -> RequestEnd:
    """Return the end of a request whose total time budget is spent."""
    sentence = "deadline: the total budget is spent"
    return RequestEnd(FinishReason.ERROR, sentence, StatusCode.DEADLINE_EXCEEDED)


def waited_too_long(retry_after_s: float) -> RequestEnd:
    """Return the end of a request that was not scheduled within its queue limit."""
    sentence = "overloaded: the request could not start within its wait limit"
    status = StatusCode.RESOURCE_EXHAUSTED
    return RequestEnd(FinishReason.ERROR, sentence, status, max(retry_after_s, 1.0))


def moved() -> RequestEnd:
    """Return the end, on this node, of a request that was migrated to another one."""
    return RequestEnd(FinishReason.MOVED)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the tokens generated from it. Engine thread only.

    While the request has a slot, its tokens are in the slot's row of the SlotTable
    (`SlotTable.tokens_of`). `token_ids` then has only the tokens with which it got the slot.
    """

    key: int  # unique number on this node
    # The router's stream and its number for the request. (0, 0) on a prefill node.
    origin: tuple[int, int]
    spec: RequestSpec
    token_ids: Ints  # prompt, then tokens generated earlier
    num_prompt: int
    sampling: SamplingParams  # from the spec, except on a node that samples only one token
    deadline: float  # time.monotonic() by which it must have ended
    arrived: float  # time.monotonic()
    # time.monotonic() by which the first forward of its prompt must begin
    start_by: float = math.inf
    # If set, it returns a vector instead of tokens and ends with its prompt.
    pooling: PoolingParams | None = None
    namespace: Namespace = SHARED  # part of the prefix cache where its KV is looked up and stored
    weights: WeightsId = UNNAMED  # version of the weights that compute it
    given_by: list[int] = field(default_factory=list)  # nodes from which some of its KV was read
    engine_crashes: int = 0  # engine crashes while it was running, see common/request.py
    alone_until: int = 0  # computed alone until it has this many tokens
    cached_tokens: int = 0  # prompt tokens whose KV was found in a cache
    loaded: bool | None = None  # result of the offload tier's lookup. False: the load is under way
    # Times when loads began and ended, alternating.
    loads: list[float] = field(default_factory=list)
    encoding: Any = None  # core.EncodingJob of its images. None: not looked up yet
    encoded: list[float] = field(default_factory=list)  # times when their encoding began and ended
    slot: int | None = field(default=None)
    # grammar.matching.Match of its grammar, created before the request is queued
    match: Any = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # computed so far
    pooled: NDArray[np.float32] | None = None  # the pooled vector, computed so far
    to_finish: RequestEnd | None = field(default=None)  # applied at the next result of its step
    admitted: float = 0.0  # time.monotonic() when its first forward was chosen
    # Times of swap-out and swap-in, alternating.
    away: list[float] = field(default_factory=list)
    preemptions: int = 0  # number of swap-outs for a more urgent request
    away_s: float = 0.0  # total of completed swap-outs
    head_start_s: float = field(init=False)  # seconds that its priority moves it ahead
    # Position in the queue. The lowest goes first: arrival time, moved earlier by the head start.
    queue_position: float = field(init=False)

    def __post_init__(self) -> None:
        self.head_start_s = head_start_s(self.spec.priority)
        self.queue_position = self.arrived - self.head_start_s

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
        pooling: PoolingParams | None = None,
    ) -> "Request":
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
        request.quarantine_after(spec.engine_crashes)
        return request

    def compute_with(self, weights: WeightsId) -> None:
        """Switch to other weights. Must not be called while the request has KV."""
        self.weights, self.namespace = weights, made_with(self.spec.cache_namespace, weights)

    def swapped_out(self, now: float) -> None:
        """Record a swap-out. Beyond MAX_ABSENCES, merge the last two."""
        if len(self.away) < 2 * MAX_ABSENCES:
            self.away.append(now)
        else:
            self.away.pop()

    def note_loaded(self, now: float) -> None:
        """Record the end of a load from an offload tier, if one is under way."""
        if len(self.loads) % 2:
            self.loads.append(now)
            del self.loads[: -2 * MAX_ABSENCES]

    @property
    def is_encoding(self) -> bool:
        """Return whether the request waits for its images to be encoded."""
        return self.encoding is not None and not self.encoding.done

    @property
    def is_away(self) -> bool:
        """Return whether the request is swapped out."""
        return len(self.away) % 2 == 1

    def swapped_in(self, now: float) -> None:
        self.away.append(now)

    def rank(self, away_s: float = 0.0) -> float:
        """Return the current urgency on the priority scale, in whole levels. Time that a request
        with a slot spent swapped out counts in its favour.

        Args:
            away_s: seconds of the current swap-out.
        """
        return self.spec.priority + (self.away_s + away_s) // STEP_S

    def quarantine_after(self, engine_crashes: int) -> None:
        """Record how many engine crashes happened while the request was running. It must have no
        slot."""
        self.engine_crashes = engine_crashes
        self.alone_until = len(self.token_ids) + QUARANTINE_TOKENS if engine_crashes else 0

    @property
    def quarantined(self) -> bool:
        """Return whether the request must be computed alone. For a request with a slot, use
        QuarantineQueue."""
        return len(self.token_ids) < self.alone_until

    @property
    def reusable_tokens(self) -> Ints:
        """Return the tokens whose KV may be read from a cache. All other tokens must be computed,
        because their logits are needed."""
        if self.pooling is not None:
            return self.token_ids[: 0 if self.pooling.of_all else -1]
        if self.sampling.prompt_logprobs < 0:
            return self.token_ids[:-1]
        return self.token_ids[: min(self.sampling.first_prompt_logprob, self.num_prompt) - 1]

    @property
    def num_prompt_logprobs(self) -> int:
        """Return the number of prompt tokens whose log-probabilities are requested."""
        if self.sampling.prompt_logprobs < 0:
            return 0
        return max(self.num_prompt - self.sampling.first_prompt_logprob, 0)

    @property
    def due(self) -> float:
        """Time by which the request must start. Without a queue limit, its arrival time."""
        return self.start_by if self.start_by < math.inf else self.arrived

    @property
    def scheduling_deadline(self) -> float:
        """Start time `due`, moved earlier by the priority's head start."""
        return self.due - self.head_start_s

    @property
    def num_generated(self) -> int:
        """Number of generated tokens in `token_ids`. Tokens added since it got its slot do not
        count."""
        return len(self.token_ids) - self.num_prompt

"""The results of a finished step, as reported outside the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.requests.logprobs import Logprobs
from common.requests.namespace import Namespace
from common.requests.prediction import PredictionUsage
from engine.batch.request import Request, RequestEnd


@dataclass(frozen=True, slots=True, eq=False)
class ChunkDone:
    """A computed chunk. KV of token indices [start, end) is final, in the request's own pages
    unless it has been retracted since. The last chunk comes with the token sampled after it, or
    with the vector that is wanted instead.

    logprobs: of that token, if requested. prompt_logprobs: of the prompt tokens except the first,
    if requested.
    """

    request: Request
    start: int
    end: int
    first_token: int | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: NDArray[np.float32] | None = None


class CorruptPrefix(NamedTuple):
    """Token ids of corrupt KV, which produced logits with NaN or Inf. It is removed from the
    cache."""

    token_ids: NDArray[np.int32]
    namespace: Namespace
    given_by: Sequence[int]  # nodes that some of it was read from


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended.

    num_generated: tokens of the response, if its own last token ended it; else 0. spoilt: its
    corrupt KV, if its logits contained NaN or Inf.
    """

    request: Request
    finish: RequestEnd
    num_generated: int = 0
    spoilt: CorruptPrefix | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """The results of one step.

    New tokens come in columns, one entry each, including a token that ends its request. `streams`
    and `requests` are the origins. `logprobs`: by origin, of the tokens of requests that ask for
    them. `predicted`: by origin, accepted and rejected tokens of the requests' predictions.
    """

    streams: NDArray[np.uint64]
    requests: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    chunks: list[ChunkDone]
    finished: list[FinishedRequest]
    logprobs: Sequence[tuple[tuple[int, int], Logprobs]] = ()
    predicted: Sequence[tuple[tuple[int, int], PredictionUsage]] = ()

"""What a finished step means for the world outside the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.requests.logprobs import Logprobs
from common.requests.namespace import Namespace
from common.requests.prediction import Predicted
from engine.batch.request import Finish, Request


@dataclass(frozen=True, slots=True, eq=False)
class ChunkDone:
    """KV of token indices [start, end) is final, in the request's own pages unless it has been
    retracted since. With the last chunk comes the token sampled after it, or the vector that is
    wanted instead.

    logprobs: of that token, prompt_logprobs: of those of the prompt but the first one; where they
    are asked for.
    """

    request: Request
    start: int
    end: int
    first_token: int | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: NDArray[np.float32] | None = None


class Spoilt(NamedTuple):
    """KV that made logits that are no numbers. Nobody finds it here any more."""

    token_ids: NDArray[np.int32]
    namespace: Namespace
    given_by: Sequence[int]  # nodes that some of it was read from


@dataclass(frozen=True, slots=True)
class Finished:
    """num_generated: tokens of the answer, where its own last one has ended it; else 0.
    spoilt: where its logits have."""

    request: Request
    finish: Finish
    num_generated: int = 0
    spoilt: Spoilt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """New tokens come in columns, one entry each; the token that ends a request is among them.
    `streams` and `requests` are the origins. `logprobs`: of those tokens whose requests ask for
    them, by origin. `predicted`: what of requests' predictions was right and wrong, likewise."""

    streams: NDArray[np.uint64]
    requests: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    chunks: list[ChunkDone]
    finished: list[Finished]
    logprobs: Sequence[tuple[tuple[int, int], Logprobs]] = ()
    predicted: Sequence[tuple[tuple[int, int], Predicted]] = ()

"""What a finished step means for the world outside the scheduler."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.rows.request import Finish, Request


@dataclass(frozen=True, slots=True, eq=False)
class ChunkDone:
    """KV of token indices [start, end) is final, in the request's own pages. With the last chunk
    comes the token sampled after it."""

    request: Request
    start: int
    end: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """num_generated: tokens of the answer, where its own last one has ended it; else 0."""

    request: Request
    finish: Finish
    num_generated: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """New tokens come in columns, one entry each; the token that ends a request is among them.
    `streams` and `requests` are the origins."""

    streams: NDArray[np.uint64]
    requests: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    chunks: list[ChunkDone]
    finished: list[Finished]

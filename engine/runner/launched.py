"""A launched step on the forward stream, and its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import (
    NOT_FINITE,
    NOT_SAMPLED,
    AcceptedRuns,
    BatchResult,
    RowLogprobRequest,
    ScheduleBatch,
)
from engine.batch.verified_rows import standing
from engine.runner.stream import StreamEvent
from engine.sampling.pooling import Pooled, of_rows

_NOT_SAMPLED = np.array(NOT_SAMPLED, np.int32)


@dataclass(slots=True, eq=False)
class StepOutput:
    """The result of a step, in host memory. Written by the forward stream. Valid after its event.

    Attributes:
        logprobs, prompt: columns of RowLogprobRequest, of samples and of prompts.
        pooled: vectors of the rows that generate no token.
        runs: tokens and counts of a step with drafts, see AcceptedRuns.
    """

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt: Mapping[str, Tensor] = field(default_factory=dict)
    pooled: Pooled = ()
    runs: tuple[Tensor, Tensor] | None = None


class LaunchedStep:
    """A launched forward and the source of its tokens.

    Args:
        later: launches the sampling, if some rows could not be sampled at launch.
    """

    def __init__(
        self,
        batch: ScheduleBatch,
        output: StepOutput,
        event: StreamEvent,
        later: Callable[[], StreamEvent] | None = None,
    ) -> None:
        self._batch = batch
        self._output = output
        self._events = [event]
        self._later = later

    @property
    def batch(self) -> ScheduleBatch:
        return self._batch

    def sample(self) -> None:
        if self._later is not None:
            self._events.append(self._later())
            self._later = None

    def result(self) -> BatchResult:
        for event in self._events:
            event.wait()
        tokens, samples = self._output.tokens.numpy(), self._batch.samples
        if np.count_nonzero(samples) != len(samples):
            tokens = np.where(samples | (tokens == NOT_FINITE), tokens, _NOT_SAMPLED)
        logprobs, prompt = _columns(self._output.logprobs), _columns(self._output.prompt)
        runs = None
        if self._output.runs is not None:
            runs = AcceptedRuns(*(tensor.numpy() for tensor in self._output.runs))
            logprobs = logprobs and _that_stand(logprobs, self._batch, runs)
        return BatchResult(tokens, logprobs, prompt, of_rows(self._output.pooled), runs)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedGroup:
    """A launched group of layers after which no token is sampled.

    Attributes:
        num_rows: rows in the result. 0: the group does not end its forward.
    """

    batch: ScheduleBatch
    event: StreamEvent
    num_rows: int = 0

    def sample(self) -> None:
        pass

    def result(self) -> BatchResult:
        self.event.wait()
        return BatchResult(np.full(self.num_rows, NOT_SAMPLED, np.int32))


def _that_stand(
    logprobs: RowLogprobRequest, batch: ScheduleBatch, runs: AcceptedRuns
) -> RowLogprobRequest:
    """Return the logprobs of accepted tokens.

    Args:
        logprobs: logprobs of all samples, in order.
    """
    rows, places = standing(batch, runs)
    asked = np.isin(places, logprobs.rows)
    found = np.searchsorted(logprobs.rows, places[asked])
    return RowLogprobRequest(
        rows[asked].astype(np.int32),
        logprobs.chosen[found],
        logprobs.top_tokens[found],
        logprobs.top[found],
        None if logprobs.hidden is None else logprobs.hidden[found],
        None if logprobs.experts is None else logprobs.experts[found],
    )


def _columns(logprobs: Mapping[str, Tensor]) -> RowLogprobRequest | None:
    if not logprobs:
        return None
    columns = {name: tensor.numpy() for name, tensor in logprobs.items() if name != "hidden"}
    hidden = logprobs.get("hidden")  # numpy has no bfloat16
    return RowLogprobRequest(**columns, hidden=None if hidden is None else hidden.float().numpy())

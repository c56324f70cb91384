"""The inputs of a model's head in one step, and the hidden states that contain them.

All ranks apply the head to the same inputs in the same order, although only rank 0 samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.batch.upload import HostColumn
from engine.models.blocks.experts import RoutedExperts

PROMPT_SLICE = 256  # tokens whose logits fit in the reserved memory
SCORED_SLICE = 32  # rows whose log-probabilities fit in the reserved memory
_NO_ROWS = torch.empty(0, dtype=torch.int64)


class ModelHeads(Protocol):
    """The heads of a model, for hidden states [n, hidden].

    Attributes:
        routed: the experts of the tokens of the newest forward. None: they are not recorded.
    """

    @property
    def routed(self) -> RoutedExperts | None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def labels(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """The inputs of the head in one step, in order.

    Attributes:
        chosen: whether a token is sampled after each of the step's samples. If not, their states do
            not go through the head.
        num_prompt: number of prompt tokens with log-probabilities. Their states follow the samples'
            states.
        scored: int64 [any], rows with token scores.
    """

    chosen: bool = True
    num_prompt: int = 0
    scored: Tensor = _NO_ROWS

    def columns(self) -> list[HostColumn]:
        return [self.scored.numpy()] if len(self.scored) else []

    def on_device(self, sent: Sequence[Tensor]) -> "HeadInputs":
        """Return the same inputs with uploaded `columns`."""
        return replace(self, scored=sent[0]) if sent else self


SAMPLES = HeadInputs()


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """The result of a forward, on the device. Forward stream only.

    Attributes:
        inputs: inputs of the head, on the device.
        hidden: [any, hidden], states of the tokens ForwardBatch.sampled.
        sampled: int64 [any or more], ForwardBatch.sampled.
        num_samples: number of leading states after which a token may be sampled.
        early: int32 [num_samples], number of positions by which each token is earlier because
            drafts were rejected. None: no token is.
        routed: int16 [any or more, layers, k], the experts of the tokens. None: the model still has
            them, because this is its newest forward.
    """

    model: ModelHeads
    inputs: HeadInputs
    hidden: Tensor
    sampled: Tensor
    num_samples: int
    early: Tensor | None = None
    routed: Tensor | None = None

    @property
    def samples(self) -> Tensor:
        return self.hidden[: self.num_samples]

    @property
    def of_prompts(self) -> Tensor:
        return self.hidden[self.num_samples :][: self.inputs.num_prompt]

    def experts(self, places: Tensor | slice) -> Tensor:
        """Return the experts of the tokens at these places of `hidden`, see RoutedExperts.of."""
        if self.routed is not None:
            return self.routed[places]
        assert self.model.routed is not None
        return self.model.routed.of(self.sampled[places])

    def experts_of_prompts(self) -> Tensor:
        return self.experts(slice(self.num_samples, self.num_samples + self.inputs.num_prompt))

    def logits(self) -> Iterator[Tensor]:
        """Apply the head to its inputs one by one, on demand: the samples, then slices of prompts,
        then slices of rows with token scores."""
        inputs, to_logits = self.inputs, self.model.logits
        if inputs.chosen:
            yield to_logits(self.samples)
        if inputs.num_prompt:
            for some in torch.split(self.of_prompts, PROMPT_SLICE):
                yield to_logits(some)
        if len(inputs.scored):
            for rows in torch.split(inputs.scored, SCORED_SLICE):
                yield to_logits(self.hidden[rows])

"""A loaded model whose forward is that of its class in transformers, with Baton's paged
attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.layer import AdaptedLinear, LateStates
from engine.models.model import Model
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.transformers_backend.attention import CurrentStep
from engine.models.transformers_backend.row_by_row import RowByRow
from engine.models.transformers_backend.skeleton import decoder_of


class TransformersModel(Model):
    """A class in two parts: its decoder, and the head that computes logits from the decoder's
    states. The decoder's layers find the current step in `step`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: PreTrainedModel,
        step: CurrentStep,
        target: LoadTarget,
        first_position: int,
    ) -> None:
        """Split `model` into its parts. It must not be used directly afterwards.

        Args:
            first_position: position of the first token, in the class's numbering.
        """
        super().__init__(spec, target)
        self._step = step
        self._first_position = first_position
        self._decoder = decoder_of(model)
        self._head = _without(model, self._decoder)
        self._call_decoder: Callable[..., Any] = self._decoder
        self._call_head: Callable[..., Any] = self._head

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that together have all weights."""
        return self._decoder, self._head

    def compute_in_one_way(self) -> None:
        """Compute each token alone from now on, where torch's functions depend on the batch. The
        next calls raise ConfigError if other operations depend on it."""
        name = type(self._head).__name__
        self._call_decoder = partial(RowByRow(name).call, self._decoder)
        self._call_head = partial(RowByRow(name).call, self._head)

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: AdaptedLinear | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        """Compute a step. `adapted` is always None, because the model has no products for adapters.
        `late` is unused, because the layers keep no recurrent states."""
        slots = (-1 - batch.token_ids).clamp_(min=0)
        known = torch.where(batch.token_ids < 0, future_tokens[slots], batch.token_ids)
        positions = batch.positions.long() + self._first_position
        with self._step.of(batch, pool):
            states = self._call_decoder(
                input_ids=known.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
        sampled: Tensor = states[0].index_select(0, batch.sampled)
        return sampled

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary], with the class's own caps and scales."""
        output = self._call_head(
            inputs_embeds=hidden.unsqueeze(0), use_cache=False, return_dict=True
        )
        logits: Tensor = output.logits
        return logits[0]


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder output with states only. Every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _IdentityDecoder(nn.Module):
    """A module that replaces a decoder and returns its input embeddings as states. It has the other
    attributes of the decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_decoder", decoder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _States:
        return _States(last_hidden_state=inputs_embeds)


def _without(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel:
    """Return `model`, changed to compute only logits."""
    place = next(name for name, module in model.named_modules() if module is decoder)
    parent, _, leaf = place.rpartition(".")
    setattr(model.get_submodule(parent), leaf, _IdentityDecoder(decoder))
    return model

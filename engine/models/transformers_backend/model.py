"""A model that is computed by the class that transformers has for it, with our attention in it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.late_states import LateStates
from engine.models.blocks.protocol import Adapted
from engine.models.drafting import DraftHead
from engine.models.linear import Product
from engine.models.spec import ModelSpec
from engine.models.transformers_backend.attention import CurrentStep
from engine.models.transformers_backend.skeleton import decoder_of
from engine.models.vision.seeing import Seeing


class BorrowedModel:
    """A class in two parts: its decoder, and what makes logits of the decoder's states.

    KV is in the pool it is given; the decoder's layers find what is computed in `step`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: PreTrainedModel,
        step: CurrentStep,
        device: torch.device,
        first_position: int,
    ) -> None:
        """Takes `model` apart: it is not to be used otherwise afterwards.

        Args:
            first_position: of a text, as the class counts.
        """
        self.spec = spec
        self.products: tuple[Product, ...] = ()
        self.seeing: Seeing | None = None
        self.drafter: DraftHead | None = None
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self._step = step
        self._first_position = first_position
        self._decoder = decoder_of(model)
        self._head = _without(model, self._decoder)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """That have all its weights."""
        return self._decoder, self._head

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: Adapted | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        """Computes a step and writes K and V of its tokens into their pages.

        Args:
            future_tokens: int32 [num_slots], the last token sampled in every slot.
            adapted: None: it has no products that adapters may add to.
            late: nothing is added: its layers keep no states.
        Returns:
            Hidden states of batch.sampled, [num_sampled, hidden], for `logits`.
        """
        slots = (-1 - batch.token_ids).clamp_(min=0)
        known = torch.where(batch.token_ids < 0, future_tokens[slots], batch.token_ids)
        positions = batch.positions.long() + self._first_position
        with self._step.of(batch, pool):
            states = self._decoder(
                input_ids=known.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
        sampled: Tensor = states[0].index_select(0, batch.sampled)
        return sampled

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], with the class's own caps and scales."""
        output = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False, return_dict=True)
        logits: Tensor = output.logits
        return logits[0]

    def labels(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError  # its spec has none


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """What a decoder gives; all but its states is nothing, whatever it is called."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivesBack(nn.Module):
    """Stands where a decoder was, and gives back as states what it gets as embeddings; else it is
    that decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_decoder", decoder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _States:
        return _States(last_hidden_state=inputs_embeds)


def _without(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel:
    """`model`, which now computes nothing but logits."""
    place = next(name for name, module in model.named_modules() if module is decoder)
    parent, _, leaf = place.rpartition(".")
    setattr(model.get_submodule(parent), leaf, _GivesBack(decoder))
    return model

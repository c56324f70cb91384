"""A draft model: a smaller decoder with the same vocabulary, which drafts from tokens only.

The KV of its layers is in the same pages as the target model's, after it. It is therefore available
wherever the target model's KV is: in the prefix cache, in offload tiers, and on the next node.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.states import DraftState
from engine.models.blocks.layer import ModelStep
from engine.models.checkpoint import Checkpoint, content, stored_names
from engine.models.decoder import Decoder
from engine.models.draft_checkpoints.eagle import DRAFT_FLAG
from engine.models.drafting import ModelVectors, one_token, view_of
from engine.models.families import read_decoder
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.vision.encoder import VisionInput
from engine.models.weights import StoredDecoder


class DraftModelCheckpoint:
    """The checkpoint of a draft model of a native family."""

    def __init__(self, directory: Path, model: ModelSpec) -> None:
        """Read the configuration.

        Args:
            model: the target model.
        Raises:
            ConfigError: the configuration is invalid or not supported, or is for another target
                model.
        """
        spec = read_decoder(directory, stored_names(directory))
        self._weights, own = StoredDecoder(directory, spec), spec.model
        if own.vocabulary_size != model.vocabulary_size:
            raise ConfigError(
                f"{DRAFT_FLAG}: {directory} has {own.vocabulary_size} tokens in its vocabulary, "
                f"and the model {model.vocabulary_size}: a draft model needs the same vocabulary"
            )
        for reason, refused in {
            "it has no language model head": not own.generates,
            "draft models with images are not supported": VisionInput.of(directory) is not None,
            "draft models with recurrent states are not supported": any(
                layer.cells for layer in own.layers
            ),
        }.items():
            if refused:
                raise ConfigError(f"{DRAFT_FLAG}: {directory} is {own.architecture}: {reason}")

    def added_to(self, model: ModelSpec) -> ModelSpec:
        own = self._weights.spec.model
        products = model.products_per_token + own.products_per_token
        return replace(model, draft=DraftState(own.layers), products_per_token=products)

    def name(self) -> str:
        """Return a name with a hash of its configuration and of all bytes of its weights."""
        tensors, spec = Checkpoint(self._weights.directory).tensors, self._weights.spec
        hashed = hashlib.sha256(repr(spec).encode())
        hashed.update(content({name: tensors[name] for name in sorted(self._weights.stored())}))
        return f"draft_model {hashed.hexdigest()}"

    def weight_bytes(self, target: LoadTarget) -> int:
        return self._weights.weight_bytes(_of_drafter(target))

    def load(self, model: Decoder) -> "DraftModel":
        """Load the draft model for a target model. See LoadableModel."""
        return DraftModel(self._weights.load(_of_drafter(model.target)))

    def refill(self, model: Decoder) -> None:
        """Read the weights of the drafter again, after `drain`."""
        assert isinstance(model.drafter, DraftModel)
        self._weights.refill(model.drafter.decoder)


def _of_drafter(target: LoadTarget) -> LoadTarget:
    """Return the draft model's own target. Its experts are always divided between ranks."""
    share = replace(target.share, whole_experts=False, placement=None)
    return replace(target, share=share)


class DraftModel:
    """A draft model that runs after the target model, see DeviceDrafter."""

    taps: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def parts(self) -> Sequence[object]:
        return self.decoder.parts

    def follow(
        self, step: ModelStep, seen: ModelVectors, future_tokens: Tensor, pool: KVPool
    ) -> None:
        batch = step.batch
        if step.late is not None and step.late.guessed:
            lasts = batch.query_starts[1:].long() - 1
            batch = one_token(batch, batch.token_ids, lasts, batch.lengths)
        self._run(batch, future_tokens, pool)

    def before(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Return undefined vectors, because a draft model continues from the KV of the tokens."""
        decoder, rows = self.decoder, batch.num_rows
        size, dtype = decoder.spec.hidden_size, decoder.dtype
        return torch.empty(rows, size, dtype=dtype, device=decoder.device)

    def advance(
        self, one: ForwardBatch, vectors: Tensor, future_tokens: Tensor, pool: KVPool
    ) -> Tensor:
        norm = self.decoder.ends.norm
        assert norm is not None
        hidden, _ = norm.forward(*self._run(one, future_tokens, pool))
        return hidden

    def logits(self, vectors: Tensor) -> Tensor:
        return self.decoder.logits(vectors)

    def _run(
        self, batch: ForwardBatch, future_tokens: Tensor, pool: KVPool
    ) -> tuple[Tensor, Tensor | None]:
        """Store the KV of a step's tokens. Return the output of the layers, see LayerByLayer."""
        x = self.decoder.embedded(batch.token_ids, future_tokens)
        return self.decoder.stack.forward(x, None, ModelStep(batch), view_of(pool), None)

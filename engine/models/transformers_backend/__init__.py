"""Models computed by their class in transformers, with Baton's paged attention.

They are slower than native blocks. Supports every decoder that uses transformers' attention
interface and keeps no state other than KV. Other models are rejected with the reason, before
weights are read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.process.resources import trim
from engine.models.checkpoint import Checkpoint
from engine.models.fields import Fields, eos_token_ids
from engine.models.linear import form_of
from engine.models.linear.dense import DenseForm
from engine.models.quantized import scheme_of
from engine.models.quantized.protocol import Scheme
from engine.models.refill import drain, found, refill
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.transformers_backend.attention import CurrentStep, PagedLayer, attach
from engine.models.transformers_backend.loading import hold, parts_of, read_model
from engine.models.transformers_backend.model import TransformersModel
from engine.models.transformers_backend.plan import connect
from engine.models.transformers_backend.skeleton import (
    MetaModel,
    config_of,
    part_of,
    products,
    skeleton,
)
from engine.ranks import Share
from engine.ranks.expert_placement import LayerSlots

# Fields of a configuration that do not affect KV.
_NOT_COMPARED = ("_name_or_path", "dtype", "eos_token_id", "torch_dtype", "transformers_version")


class TransformersCheckpoint:
    """A checkpoint computed by a class of transformers, see LoadableModel."""

    backend = "transformers"
    refilled_whole = True
    drafter = "none"

    def __init__(self, directory: Path, because: str) -> None:
        """Read the configuration.

        Args:
            because: reason why the model is not computed natively.
        Raises:
            ConfigError: the configuration is invalid, or the class is not supported.
        """
        self._directory = directory
        stored = Fields.of(directory / "config.json")
        self._scheme = scheme_of(stored)
        self._skeleton = skeleton(directory)
        self.spec = _spec(self._skeleton, stored, directory, self._scheme)
        self.computed = f"by transformers' {self._skeleton.name}, {because}"
        if self._skeleton.limited:
            self.computed += f"; {self._skeleton.limited}"

    def stored(self) -> Iterable[str]:
        return Checkpoint(self._directory).tensors

    def weight_bytes(self, target: LoadTarget) -> int:
        part, form, dtype = self._part(target.share), form_of(target), target.dtype
        model, tied = part.model, part.plan.tied
        # Tied weights are counted once.
        named = model.named_parameters(remove_duplicate=False)
        counted = {id(x): x for name, x in named if name != tied}
        num_bytes: int = sum(x.numel() for x in counted.values()) * dtype.itemsize
        num_bytes += sum(x.nbytes for x in model.buffers())
        for name, _, outputs, inputs in products(model):
            if f"{name}.weight" == tied:
                num_bytes += form.tied_bytes(outputs, inputs)
            else:
                num_bytes += form.num_bytes(outputs, inputs) - outputs * inputs * dtype.itemsize
        return num_bytes

    def load(self, target: LoadTarget) -> TransformersModel:
        part, form, group = self._part(target.share), form_of(target), target.share.group
        model = read_model(self._directory, self._scheme, part, target)
        step = CurrentStep()
        for layer in part.attending:
            paged = PagedLayer(step, part.place(layer), layer.stores, layer.window)
            attach(model.get_submodule(layer.module), paged)
        if not isinstance(form, DenseForm):  # the class already has dense matrices
            hold(model, form)
        if group is not None:
            connect(model, part.plan, group)
        return TransformersModel(self.spec, model, step, target, part.first_position)

    def refill(self, model: object) -> None:
        if not isinstance(model, TransformersModel):
            raise ConfigError(
                f"{self._directory}: the running model does not use the Transformers library"
            )
        fresh = self.load(model.target)
        refill(parts_of(model.modules), parts_of(fresh.modules))
        del fresh
        trim()

    def move_experts(self, model: object, moves: Mapping[str, LayerSlots]) -> None:
        raise ConfigError(
            f"{self._directory}: experts of the Transformers library cannot be moved between ranks"
        )

    def drain(self, model: object) -> None:
        assert isinstance(model, TransformersModel)
        drain(parts_of(model.modules))
        trim()

    def tensors(self, model: object) -> Iterable[Tensor]:
        assert isinstance(model, TransformersModel)
        return found(Tensor, parts_of(model.modules))

    def _part(self, share: Share) -> MetaModel:
        """Return the class as a rank has it. Raise ConfigError as `part_of` does."""
        for setting, reason, used in (
            ("pp", "stages", share.stage is not None),
            ("experts", "whole experts on each rank", share.whole_experts),
            ("dp", "data-parallel groups", share.exchange is not None),
        ):
            if used:
                raise ConfigError(
                    f"engine.parallel.{setting}: {self._skeleton.name} runs on the Transformers "
                    f"library, which does not support {reason}"
                )
        if share.size == 1:
            return self._skeleton
        return part_of(self._skeleton, config_of(self._directory), share)

    def config_hash(self) -> str:
        config = self._skeleton.model.config.to_diff_dict()
        said = {name: value for name, value in config.items() if name not in _NOT_COMPARED}
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _spec(skeleton: MetaModel, stored: Fields, directory: Path, scheme: Scheme) -> ModelSpec:
    config = skeleton.config
    return ModelSpec(
        architecture=config.model_type,
        vocabulary_size=config.vocab_size,
        hidden_size=config.hidden_size,
        dtype=config.dtype or torch.float32,
        context_length=skeleton.context_length,
        eos_token_ids=eos_token_ids(directory, stored),
        layers=skeleton.keeps,
        products_per_token=skeleton.products_per_token,
        stored=scheme.name,
    )

"""Loading of a class of transformers with its weights, on the device, in the compute dtype.

A checkpoint's tensors are read as floats, with the names of the transformers class. Each quantised
matrix is converted only when it is read.

Modules that multiply by a matrix and add a bias are then converted to the form for this machine.
Stacked experts, and matrices that a class multiplies in its own code, stay as they were loaded.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import EllipsisType

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.process.resources import trim
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.linear import Form, Linear, Matrix
from engine.models.quantized.protocol import MatrixLocation, Scheme, wanted_by
from engine.models.spec import LoadTarget
from engine.models.transformers_backend.attention import NAME
from engine.models.transformers_backend.plan import cut_tied, cutting, loaded
from engine.models.transformers_backend.skeleton import MetaModel, config_of, products

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that is read by `[...]`, like slices of safetensors. On any thread."""

    read: Callable[[], Tensor]

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        return self.read()


def as_floats(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, Unread]:
    """Return the tensors by name.

    Raises:
        ConfigError: parts of a matrix are missing, or have unexpected shapes or dtypes.
    """
    wanted: dict[str, TensorRequest] = {}
    matrices: dict[str, Unread] = {}
    for name in checkpoint.tensors:
        module = name.removesuffix(scheme.numbers)
        if module != name and not checkpoint.has_floats(f"{module}.weight"):
            at = MatrixLocation(checkpoint, module, *scheme.shape(module, checkpoint))
            wanted |= wanted_by(scheme, at)
            matrices[f"{module}.weight"] = Unread(partial(_floats, scheme, at))
    ignored = tuple(scheme.ignored)
    whole = [n for n in checkpoint.tensors if n not in wanted and not n.endswith(ignored)]
    for name in whole:
        stored = checkpoint.tensors[name]
        wanted[name] = TensorRequest(stored.shape, (stored.dtype,))
    checkpoint.check(wanted, scheme.ignored)
    return matrices | {name: Unread(partial(checkpoint.read, name)) for name in whole}


def _floats(scheme: Scheme, at: MatrixLocation) -> Tensor:
    return scheme.matrix(at).floats()


def read_model(
    directory: Path, scheme: Scheme, skeleton: MetaModel, target: LoadTarget
) -> PreTrainedModel:
    """Read a rank's part of a model. The ranks do not exchange anything yet.

    Args:
        skeleton: the class as the rank has it.
    Raises:
        ConfigError: weights are missing or have unexpected shapes.
    """
    kind, plan, share = type(skeleton.model), skeleton.plan, target.share
    if share.size == 1:
        return _from_files(directory, scheme, kind, target)
    # transformers then reads each tensor when it needs it, instead of all of them in advance.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    model = _from_files(directory, scheme, cutting(kind, plan, share), target)
    loaded(model, plan)
    cut_tied(model, plan, share)
    return model


def _from_files(
    directory: Path, scheme: Scheme, kind: type[PreTrainedModel], target: LoadTarget
) -> PreTrainedModel:
    tensors = as_floats(Checkpoint(directory), scheme)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            None,
            config=config_of(directory),
            state_dict=tensors,
            dtype=target.dtype,
            attn_implementation=NAME,
            device_map={"": target.device},
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{directory}: transformers cannot load the weights: {line}") from error
    wrong = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])]
    if wrong:
        raise ConfigError(
            f"{directory}: the checkpoint misses {len(wrong)} weights, or has them in other "
            f"shapes: {', '.join(sorted(wrong)[:3])}{', ...' if len(wrong) > 3 else ''}"
        )
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        log.warning("unused weights of %s: %s", type(model).__name__, ", ".join(names[:3]))
    return model.eval()


class WeightHolder(nn.Module):
    """A module that replaces a product. Its `weight` has a shape and a dtype, but no values."""

    def __init__(self, linear: Linear, outputs: int, weight: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = outputs, weight.numel() // outputs
        self.weight = torch.empty(
            self.out_features, self.in_features, dtype=weight.dtype, device="meta"
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear.apply(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


def _numbers(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the matrix [out, in] and the bias [out]."""
    named = dict(module.named_parameters())
    weight, bias = named["weight"].detach(), named.get("bias")
    matrix = weight if type(module) is nn.Linear else weight.T  # Conv1D has inputs first
    return matrix, None if bias is None else bias.detach()


def hold(model: PreTrainedModel, form: Form) -> None:
    """Convert every product of `model` to `form`. Only one matrix at a time is in memory twice."""
    embedding = model.get_input_embeddings().weight.untyped_storage().data_ptr()
    head = model.get_output_embeddings()
    for name, outputs in [(name, outputs) for name, _, outputs, _ in products(model)]:
        module = model.get_submodule(name)
        weight, bias = _numbers(module)
        if module is head and weight.untyped_storage().data_ptr() == embedding:
            linear = form.tied(weight)
        else:
            linear = form.hold(Matrix(weight), bias)
        parent, _, leaf = name.rpartition(".")
        held = WeightHolder(linear, outputs, weight)
        model.get_submodule(parent).register_module(leaf, held)
        del module, weight
        trim()


def parts_of(modules: Sequence[nn.Module]) -> list[object]:
    """Return the objects that hold numbers, as arguments of `refill`: the class's own tensors, and
    converted products."""
    parts: list[object] = []
    for module in chain.from_iterable(each.modules() for each in modules):
        parts += module.parameters(recurse=False)
        parts += module.buffers(recurse=False)
        if isinstance(module, WeightHolder):
            parts.append(module.linear)
    return parts

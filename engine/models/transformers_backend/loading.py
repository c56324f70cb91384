"""Loading of a class of transformers with its weights, on the device, in the compute dtype.

A checkpoint's tensors are read as floats, with the names of the transformers class. Each quantised
matrix is converted only when it is read.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.quantized.protocol import MatrixLocation, Scheme, wanted_by
from engine.models.spec import LoadTarget
from engine.models.transformers_backend.attention import NAME
from engine.models.transformers_backend.parts import cut_tied, cutting, loaded
from engine.models.transformers_backend.skeleton import MetaModel, config_of

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

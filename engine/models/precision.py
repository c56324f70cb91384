"""Choice of a model's compute dtype on this machine, with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.models.checkpoint import Checkpoint
from engine.processor import BFLOAT16

# A smaller float32 checkpoint stays exact: it was stored that way deliberately, and its steps are
# not limited by reading weights.
SMALL_BYTES = 256 << 20
_NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """A compute dtype.

    Attributes:
        because: reason for the choice, as the end of a sentence.
    """

    dtype: torch.dtype
    because: str

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(
    name: str, device: torch.device, checkpoint: Checkpoint, features: Sequence[str]
) -> Precision:
    """Return the dtype that `engine.dtype` selects for this model on this machine.

    auto is bfloat16 on CUDA. On a CPU it is float32 if the processor has no native bfloat16
    products, or if the checkpoint is float32 and smaller than SMALL_BYTES. Otherwise it is
    bfloat16.

    Args:
        features: features of the processor, see `matrix_features`.
    """
    if name != "auto":
        return Precision(_NAMED[name], "as configured")
    if device.type != "cpu":
        return Precision(torch.bfloat16, "the device is a GPU")
    native = sorted(BFLOAT16 & set(features))
    if not native:
        return Precision(torch.float32, "the processor has no native bfloat16")
    stored = checkpoint.tensors.values()
    num_bytes = sum(tensor.num_bytes for tensor in stored)
    if all(tensor.dtype == "F32" for tensor in stored) and num_bytes < SMALL_BYTES:
        return Precision(
            torch.float32, f"the checkpoint is float32 and below {SMALL_BYTES >> 20} MiB"
        )
    return Precision(torch.bfloat16, f"the processor has {', '.join(native)}")

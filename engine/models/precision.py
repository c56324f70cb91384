"""The dtype that a model is computed in on this machine, and why that one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.models.checkpoint import Checkpoint
from engine.processor import BFLOAT16

# A float32 checkpoint below this stays exact: it was stored so for a reason, and there is little
# to gain where a step is not bound by reading weights.
SMALL_BYTES = 256 << 20
_NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """because: the reason, as the end of a sentence."""

    dtype: torch.dtype
    because: str

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(
    name: str, device: torch.device, checkpoint: Checkpoint, features: Sequence[str]
) -> Precision:
    """What `engine.dtype` means for this model here.

    auto is bfloat16 on CUDA. On a CPU it is float32 where the processor does not multiply bfloat16
    natively, and where the checkpoint is float32 and smaller than SMALL_BYTES; else bfloat16.

    Args:
        features: of the processor, see `matrix_features`.
    """
    if name != "auto":
        return Precision(_NAMED[name], "asked for")
    if device.type != "cpu":
        return Precision(torch.bfloat16, "the device is a GPU")
    native = sorted(BFLOAT16 & set(features))
    if not native:
        return Precision(torch.float32, "the processor does not multiply bfloat16 natively")
    stored = checkpoint.tensors.values()
    num_bytes = sum(tensor.num_bytes for tensor in stored)
    if all(tensor.dtype == "F32" for tensor in stored) and num_bytes < SMALL_BYTES:
        return Precision(
            torch.float32, f"the checkpoint is float32 and below {SMALL_BYTES >> 20} MiB"
        )
    return Precision(torch.bfloat16, f"the processor has {', '.join(native)}")

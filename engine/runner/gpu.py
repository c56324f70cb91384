"""What must be so about CUDA before an engine is built on it, and what is set for the process.

Knows nothing of models or memory.
"""

from collections.abc import Mapping

import torch

from common.errors import ConfigError

# How torch says that this machine has no GPU, or shows none to this process. All else that it says
# is of a GPU that is there.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def has_gpu() -> bool:
    """Raises ConfigError where there is a GPU that this torch cannot use, as with a driver that is
    older than the wheel: serving on the CPU instead would look like a slow GPU."""
    if torch.cuda.is_available():
        return True
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not reason.startswith(_NO_GPU):
            raise ConfigError(
                f"engine.device: there is a GPU that torch {torch.__version__} cannot use: "
                f"{reason} (engine.device cpu does without)"
            ) from None
    return False


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where torch is told to make memory that other processes cannot map."""
    for name in _ALLOCATOR_SETTINGS:
        settings = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            raise ConfigError(
                f"{name}: expandable_segments is not supported: other nodes map the KV pool, and "
                "memory in such segments cannot be mapped"
            )


def use_gpu(device: torch.device) -> None:
    """Makes `device` the calling thread's, and sums of 16-bit products float32 throughout."""
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

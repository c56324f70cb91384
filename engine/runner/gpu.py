"""CUDA requirements that are checked before an engine is built, and CUDA settings of the process.

Independent of models and memory.
"""

from collections.abc import Mapping

import torch

from common.errors import ConfigError

# torch's messages for a machine without a GPU, or without one visible to this process. All other
# messages concern an existing GPU.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def has_gpu() -> bool:
    """Return whether this process has a GPU.

    Raises ConfigError if there is a GPU that this torch cannot use, for example because the driver
    is too old. Serving on the CPU instead would look like a slow GPU.
    """
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
    """Raise ConfigError if torch's allocator is configured to use memory that other processes
    cannot map."""
    for name in _ALLOCATOR_SETTINGS:
        settings = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            raise ConfigError(
                f"{name}: expandable_segments is not supported: other nodes map the KV pool, and "
                "memory in such segments cannot be mapped"
            )


def use_gpu(device: torch.device) -> None:
    """Make `device` the calling thread's current one, and sum 16-bit products in float32."""
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

"""CUDA requirements that are checked before an engine is built, and CUDA settings of the
process."""

import ctypes
import logging
from collections.abc import Mapping

import torch

from common.errors import ConfigError
from common.logs import kv
from kernels.early_launch import LEAST_CAPABILITY, LEAST_DRIVER, use_early_launch

# Messages of torch for a machine without a GPU, or without one visible to this process. All other
# messages are about a GPU that exists.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

log = logging.getLogger(__name__)


def has_gpu() -> bool:
    """Return whether this process has a GPU.

    Raises:
        ConfigError: torch cannot use the GPU, for example because the driver is too old. Serving on
            the CPU instead would look like a slow GPU.
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
                f"engine.device: torch {torch.__version__} cannot use the GPU: {reason}. To "
                "run without it, set engine.device to cpu"
            ) from None
    return False


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if torch's allocator is set to use memory that other processes cannot
    map."""
    for name in _ALLOCATOR_SETTINGS:
        settings = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            raise ConfigError(
                f"{name}: expandable_segments is not supported: other nodes map the KV pool, and "
                "memory in such segments cannot be mapped"
            )


def use_gpu(device: torch.device) -> None:
    """Make `device` the calling thread's current device, and accumulate 16-bit products in
    float32."""
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_early_launch(device: torch.device, *, wanted: bool) -> None:
    """Let each kernel of this process start before the previous one ends, if GPU and driver support
    it. Log the choice."""
    major, minor = torch.cuda.get_device_capability(device)
    driver = _driver_version()
    reason = ""
    if not wanted:
        reason = "engine.early_launch is off"
    elif 10 * major + minor < LEAST_CAPABILITY:
        reason = f"compute capability {major}.{minor} is below 9.0"
    elif driver < LEAST_DRIVER:
        reason = f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, not 12.3"
    use_early_launch(not reason)
    if reason:
        log.info("programmatic dependent launch is off %s", kv(reason=reason))
    else:
        log.info("programmatic dependent launch is on %s", kv(driver=driver))


def _driver_version() -> int:
    """Return the CUDA version of the driver, 12030 for 12.3, or 0 if it does not report one."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value

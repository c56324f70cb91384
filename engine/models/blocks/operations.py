"""Choice of the operations of layers: Baton's own, or those of an optional package.

`engine.attention_backend` and `engine.linear_attention_backend` configure them.
"""

import torch

from common.config import EngineConfig
from common.errors import ConfigError
from engine.models.spec import ModelSpec
from kernels.backends import chosen
from kernels.backends.fla import LONGEST_KEY, FlashLinearAttention
from kernels.backends.flashinfer import HEAD_DIMS, LATENT_DIMS, FlashInfer
from kernels.backends.package import Unavailable


def use_operations(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, spec: ModelSpec
) -> None:
    """Choose the operations of this process. Call it before the model is loaded.

    Args:
        device, dtype: device and compute dtype of the model.
    Raises:
        ConfigError: a package is missing, or does not support the device or the model.
    """
    operations = chosen.Operations()
    if config.attention_backend == "flashinfer":
        setting = "engine.attention_backend: flashinfer"
        _check_device(setting, device, dtype)
        _check_attention(setting, spec, narrow=config.cache.dtype != "auto")
        try:
            operations.plan_attention = FlashInfer.open(device).plan_attention
        except Unavailable as error:
            raise ConfigError(f"{setting}: {error}") from error
    if config.linear_attention_backend == "fla":
        setting = "engine.linear_attention_backend: fla"
        _check_device(setting, device, dtype)
        _check_linear_attention(setting, spec)
        try:
            operations.delta_rule = FlashLinearAttention.open().delta_rule
        except Unavailable as error:
            raise ConfigError(f"{setting}: {error}") from error
    chosen.use_operations(operations)


def _check_device(setting: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda":
        raise ConfigError(f"{setting} needs a GPU, and the device is {device}")
    if dtype == torch.float32:
        raise ConfigError(f"{setting} does not compute float32: set engine.dtype to bfloat16")


def _check_attention(setting: str, spec: ModelSpec, *, narrow: bool) -> None:
    drafted = () if spec.draft is None else spec.draft.layers
    shapes = {state.shape for state in (*spec.layers, *drafted) if state.token_numbers}
    # A token has two vectors in the cache (key and value), or one (latent).
    for _, vectors, size in sorted(shapes):
        if vectors == 2 and size not in HEAD_DIMS:
            raise ConfigError(f"{setting} does not support heads of {size} numbers")
        if vectors == 1 and size != sum(LATENT_DIMS):
            raise ConfigError(f"{setting} does not support latents of {size} numbers")
        if vectors == 1 and narrow:
            raise ConfigError(
                f"{setting} does not support latents in 8 bits: set engine.cache.dtype to auto"
            )


def _check_linear_attention(setting: str, spec: ModelSpec) -> None:
    keys = [cell.shape[0] for state in spec.layers for cell in state.cells if cell.name == "delta"]
    if not keys:
        raise ConfigError(f"{setting} has no effect: the model has no linear attention")
    if max(keys) > LONGEST_KEY:
        raise ConfigError(f"{setting} does not support keys of {max(keys)} numbers")

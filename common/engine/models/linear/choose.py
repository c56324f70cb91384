"""Which form a model's matrices get, by device, dtype and what is asked for."""

import torch

from common.config import Quantize
from common.engine.models.linear import onednn
from common.engine.models.linear.dense import DenseForm
from common.engine.models.linear.int8 import Int8Form
from common.engine.models.linear.packed import PackedForm
from common.engine.models.linear.protocol import Form
from common.errors import ConfigError


def form_of(device: torch.device, dtype: torch.dtype, quantize: Quantize) -> Form:
    """float32 stays as it is: what it computes is compared with other implementations token by
    token, and one row is no faster packed.

    Raises:
        ConfigError: nothing here multiplies what is asked for.
    """
    if quantize == "int8":
        return _int8(device)
    if device.type == "cpu" and dtype == torch.bfloat16 and onednn.packs_bfloat16():
        return PackedForm(dtype)
    return DenseForm(device, dtype)


def _int8(device: torch.device) -> Form:
    if device.type != "cpu":
        raise ConfigError(
            f"engine.quantize: int8 is computed on a CPU alone, and the device is {device}"
        )
    if not onednn.multiplies_int8():
        raise ConfigError(
            "engine.quantize: int8 needs a processor with AVX512-VNNI and a torch with oneDNN"
        )
    return Int8Form()

"""Choice of the form of a model's matrices, by device, dtype and requested quantisation."""

from typing import NoReturn

import torch

from common.config import Quantize
from common.errors import ConfigError
from engine.models.linear import onednn
from engine.models.linear.as_stored import AsStoredForm
from engine.models.linear.dense import DenseForm
from engine.models.linear.int8 import Int8Form
from engine.models.linear.packed import PackedForm
from engine.models.linear.panels import Int8PanelForm, PanelForm
from engine.models.linear.protocol import Form
from kernels import device as devices


def form_of(
    device: torch.device, dtype: torch.dtype, quantize: Quantize, *, int8_stored: bool = False
) -> Form:
    """Return the preferred form: products compiled for this CPU, then oneDNN's, then torch's own.

    Args:
        int8_stored: the checkpoint has int8 matrices by channel. They are multiplied as they are if
            possible, and otherwise converted to floats.
    Raises:
        ConfigError: no form here supports the requested quantisation.
    """
    compiled = devices.compiled_for(device)
    int8 = _int8(device)
    if quantize == "int8":
        return int8 if int8 is not None else _refused(device)
    if int8_stored and int8 is not None:
        return AsStoredForm(int8, form_of(device, dtype, "none"))
    if compiled is not None and compiled.multiplies(dtype):
        return PanelForm(dtype, compiled)
    if device.type == "cpu" and dtype == torch.bfloat16 and onednn.packs_bfloat16():
        return PackedForm(dtype)
    return DenseForm(device, dtype)


def rounding_of(
    device: torch.device, quantize: Quantize, *, int8_stored: bool, ranks: int = 1
) -> str:
    """Return how inputs and weights of products are rounded here. Nodes compare it because KV
    depends on it.

    Args:
        ranks: parts of the model. Each part scales its own int8 inputs.
    """
    rounding: str = quantize
    if quantize == "none" and int8_stored and _int8(device) is not None:
        rounding = "int8 as stored"
    return rounding if rounding == "none" or ranks == 1 else f"{rounding} by parts"


def _int8(device: torch.device) -> Form | None:
    """Return the form that multiplies int8 here, if any."""
    if device.type != "cpu":
        return None
    compiled = devices.compiled_for(device)
    if compiled is not None and compiled.multiplies(torch.int8):
        return Int8PanelForm(compiled)
    return Int8Form() if onednn.multiplies_int8() else None


def _refused(device: torch.device) -> NoReturn:
    if device.type != "cpu":
        raise ConfigError(
            f"engine.quantize: int8 is computed on a CPU alone, and the device is {device}"
        )
    raise ConfigError(
        "engine.quantize: int8 needs a processor with AVX512-VNNI and a torch with oneDNN"
    )

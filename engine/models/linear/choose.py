"""Choice of the form of a model's matrices, by device, dtype and requested quantisation."""

from typing import NoReturn

import torch

from common.config import Quantize
from common.errors import ConfigError
from engine.models.linear import onednn
from engine.models.linear.as_stored import AsStoredForm
from engine.models.linear.dense import DenseForm
from engine.models.linear.int8 import Int8Form
from engine.models.linear.matrix import INT8
from engine.models.linear.packed import PackedForm
from engine.models.linear.panels import Int8PanelForm, PanelForm
from engine.models.linear.protocol import Form
from engine.models.linear.weight_only import WeightOnlyForm
from kernels import device as devices
from kernels.quantised import QuantFormat, widens


def form_of(
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize,
    stored: QuantFormat | None = None,
) -> Form:
    """Return the preferred form.

    On a GPU: weights as they are stored, then torch's own products. On a CPU: products compiled for
    it, then oneDNN's, then torch's own.

    Args:
        stored: the format of the checkpoint's quantised matrices. They are multiplied as they are
            if possible, and otherwise converted to floats.
    Raises:
        ConfigError: no form here supports the requested quantisation.
    """
    compiled = devices.compiled_for(device)
    int8 = _int8(device)
    if quantize == "int8":
        return int8 if int8 is not None else _refused(device)
    if stored == INT8 and int8 is not None:
        return AsStoredForm(INT8, int8, form_of(device, dtype, "none"))
    if stored is not None and device.type == "cuda" and widens(stored, device):
        return WeightOnlyForm(device, dtype)
    if compiled is not None and compiled.multiplies(dtype):
        return PanelForm(dtype, compiled)
    if device.type == "cpu" and dtype == torch.bfloat16 and onednn.packs_bfloat16():
        return PackedForm(dtype)
    return DenseForm(device, dtype)


def rounding_of(
    device: torch.device, quantize: Quantize, stored: QuantFormat | None, ranks: int = 1
) -> str:
    """Return how inputs and weights of products are rounded here. Nodes compare it because KV
    depends on it.

    Args:
        ranks: parts of the model. Each part scales its own int8 inputs.
    """
    rounding: str = quantize
    if quantize == "none" and stored == INT8 and _int8(device) is not None:
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

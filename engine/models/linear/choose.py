"""Choice of the form of a model's matrices, by device, dtype and requested quantisation."""

from typing import NoReturn

import torch

from common.config import Quantize
from common.errors import ConfigError
from engine.models.linear import onednn
from engine.models.linear.as_stored import AsStoredForm
from engine.models.linear.code_panels import CodePanelForm
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
    if quantize == "int8":
        int8 = _int8(device)
        return int8 if int8 is not None else _refused(device)
    kept = None if stored is None else _stored_form(device, dtype, stored)
    return _float_form(device, dtype) if kept is None else kept


def stays_stored(device: torch.device, stored: QuantFormat | None) -> bool:
    """Return whether `form_of` keeps matrices of this format as they are stored."""
    return stored is not None and _stored_form(device, torch.float32, stored) is not None


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


def _float_form(device: torch.device, dtype: torch.dtype) -> Form:
    compiled = devices.compiled_for(device)
    if compiled is not None and compiled.multiplies(dtype):
        return PanelForm(dtype, compiled)
    if device.type == "cpu" and dtype == torch.bfloat16 and onednn.packs_bfloat16():
        return PackedForm(dtype)
    return DenseForm(device, dtype)


def _stored_form(device: torch.device, dtype: torch.dtype, stored: QuantFormat) -> Form | None:
    """Return the form that keeps matrices of this format, if any."""
    if device.type == "cuda":
        return WeightOnlyForm(device, dtype) if widens(stored, device) else None
    int8, compiled = _int8(device), devices.compiled_for(device)
    if stored == INT8 and int8 is not None:
        return AsStoredForm(INT8, int8, _float_form(device, dtype))
    if stored.bits == 4 and compiled is not None:
        return CodePanelForm(compiled, _float_form(device, dtype))
    return None


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
            f"engine.quantize: int8 is only supported on CPUs, and the device is {device}"
        )
    raise ConfigError(
        "engine.quantize: int8 needs a processor with AVX512-VNNI and a torch with oneDNN"
    )

"""Choice of the form of a model's matrices, by device, dtype and requested quantisation.

The form may combine two: one for matrices that stay as stored, and one for the others.
"""

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from common.config import Quantize
from common.errors import ConfigError
from engine.models.linear import onednn
from engine.models.linear.dense import DenseForm, WeightOnlyForm
from engine.models.linear.int8 import Int8Form, RoundingForm
from engine.models.linear.matrix import INT8, Matrix
from engine.models.linear.onednn import PackedForm
from engine.models.linear.panels import CodePanelForm, Int8PanelForm, PanelForm
from engine.models.linear.protocol import Form, Linear
from engine.models.spec import LoadTarget
from kernels import device as devices
from kernels.quantised import QuantFormat, widens


@dataclass(frozen=True, slots=True)
class AsStoredForm(Form):
    """A form that uses quantised matrices as they are stored, if `quantised` keeps them, and holds
    all other matrices in `rest`. CPU only."""

    quantised: Form
    rest: Form

    def hold(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        return self._form(matrix.format, matrix.numbers.shape[1]).hold(matrix, bias)

    def tied(self, embedding: Tensor) -> Linear:
        return self.rest.tied(embedding)

    def num_bytes(self, rows: int, columns: int, stored: QuantFormat | None = None) -> int:
        return self._form(stored, columns).num_bytes(rows, columns, stored)

    def tied_bytes(self, rows: int, columns: int) -> int:
        return self.rest.tied_bytes(rows, columns)

    def _form(self, stored: QuantFormat | None, inputs: int) -> Form:
        kept = stored is not None and self.quantised.keeps(stored, inputs)
        return self.quantised if kept else self.rest


def form_of(target: LoadTarget, stored: QuantFormat | None = None) -> Form:
    """Return the preferred form.

    On a GPU: weights as they are stored, then torch's own products. On a CPU: products compiled for
    it, then oneDNN's, then torch's own.

    Args:
        stored: format of the checkpoint's quantised matrices. They are used as stored if possible,
            and otherwise converted to floats.
    Raises:
        ConfigError: no form on this machine supports the requested quantisation.
    """
    device, dtype = target.device, target.dtype
    if target.quantize == "int8":
        return _int8(device) or _refused(device)
    kept = None if stored is None else _stored_form(device, dtype, stored)
    return _float_form(device, dtype) if kept is None else kept


def stays_stored(device: torch.device, stored: QuantFormat | None) -> bool:
    """Return whether `form_of` keeps matrices of this format as they are stored."""
    return stored is not None and _stored_form(device, torch.float32, stored) is not None


def rounding_of(
    device: torch.device, quantize: Quantize, stored: QuantFormat | None, ranks: int = 1
) -> str:
    """Return how inputs and weights of products are rounded on this machine. Nodes compare it
    because KV depends on it.

    Args:
        ranks: number of parts of the model. Each part scales its own int8 inputs.
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
    """Return the form that keeps matrices of this format, or None."""
    if device.type == "cuda":
        return WeightOnlyForm(device, dtype) if widens(stored, device) else None
    int8, compiled = _int8(device), devices.compiled_for(device)
    if stored == INT8 and int8 is not None:
        return AsStoredForm(int8, _float_form(device, dtype))
    if stored.bits == 4 and compiled is not None:
        return AsStoredForm(CodePanelForm(compiled), _float_form(device, dtype))
    return None


def _int8(device: torch.device) -> RoundingForm | None:
    """Return the form that multiplies int8 on this machine, or None."""
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

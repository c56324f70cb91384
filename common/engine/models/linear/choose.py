"""Which form a model's matrices get, by device and dtype."""

import torch

from common.engine.models.linear import onednn
from common.engine.models.linear.dense import DenseForm
from common.engine.models.linear.packed import PackedForm
from common.engine.models.linear.protocol import Form


def form_of(device: torch.device, dtype: torch.dtype) -> Form:
    """float32 stays as it is: what it computes is compared to the last bit, and one row is no
    faster packed."""
    if device.type == "cpu" and dtype == torch.bfloat16 and onednn.packs_bfloat16():
        return PackedForm(dtype)
    return DenseForm(device, dtype)

"""RMSNorm of each head, times the SiLU of a gate."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.layers.rms_norm import rms_norm_reference, weighted


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x) * weight * silu(gate), rounded after the norm and once at the end.

    Args:
        x: contiguous [num_tokens, heads, size].
        gate: [num_tokens, groups, heads / groups * size] of x's dtype, columns contiguous. Tokens
            and groups may be strided.
        weight: contiguous [size], of x's dtype or float32.
    Returns:
        [num_tokens, heads * size].
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    num_tokens, heads, size = x.shape
    groups = gate.shape[1]
    if heads % groups or gate.shape != (num_tokens, groups, heads // groups * size):
        raise ValueError(f"gate {tuple(gate.shape)} does not fit x {tuple(x.shape)}")
    if weight.shape != (size,) or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight: {x.dtype} or float32 [{size}] expected")
    if gate.stride(2) != 1 or gate.dtype != x.dtype or not x.is_contiguous():
        raise ValueError("x and the columns of the gate must be contiguous and of one dtype")
    if device.uses_triton(x):
        return gated_rms_norm_triton(x, gate, weight, eps)
    if (compiled := device.compiled(x)) is not None:
        return compiled.gated_rms_norm(x, gate, weight, eps)
    return gated_rms_norm_reference(x, gate, weight, eps)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = rms_norm_reference(x, weight, eps).flatten(1)
    return (normed.float() * F.silu(gate.flatten(1).float())).to(x.dtype)


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    num_tokens, heads, size = x.shape
    out = torch.empty(num_tokens, heads * size, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gated_rms_norm_kernel[(num_tokens, heads)](
            x, gate, weight, out, gate.stride(0), gate.stride(1), eps,
            PER_GROUP=heads // gate.shape[1], SIZE=size, BLOCK=triton.next_power_of_2(size),
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@bound
@triton.jit(do_not_specialize=["gate_ptr"])
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    group_stride,
    eps,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    mask = col < SIZE
    place = (token * tl.num_programs(1) + head) * SIZE + col
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
    normed = weighted(x * scale, weight).to(dtype).to(tl.float32)
    gate_ptr += token * gate_stride + (head // PER_GROUP) * group_stride
    gate = tl.load(gate_ptr + (head % PER_GROUP) * SIZE + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (normed * gate / (1.0 + tl.exp(-gate))).to(dtype), mask=mask)

"""The activation act(gate) * up after a fused gate-up projection."""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.bound import bound

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Return act(x[:, :d]) * x[:, d:], in float32, rounded once.

    Args:
        x: contiguous [n, 2d], the gate's columns first.
        activation: gelu is x * Phi(x), gelu_tanh its approximation by a hyperbolic tangent.
    Returns:
        [n, d] of x's dtype.
    Raises:
        ValueError: x is not contiguous [n, 2d].
    Source: gelu_tanh: Gaussian Error Linear Units, Hendrycks and Gimpel 2016, section 2.
    """
    if x.ndim != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"contiguous [n, 2d] expected, got {tuple(x.shape)}")
    if device.uses_triton(x):
        return act_and_mul_triton(x, activation)
    if (compiled := device.compiled(x)) is not None:
        return compiled.act_and_mul(x, activation)
    return act_and_mul_reference(x, activation)


def act_and_mul_reference(x: Tensor, activation: Activation) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            gate = F.silu(gate)
        case "gelu":
            gate = F.gelu(gate)
        case "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
    return gate.mul_(up).to(x.dtype)


def act_and_mul_triton(x: Tensor, activation: Activation) -> Tensor:
    n, d = x.shape[0], x.shape[1] // 2
    out = torch.empty(n, d, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(d))
        early = early_launch.launches_early()
        _act_and_mul_kernel[(n, triton.cdiv(d, block))](
            x,
            out,
            d,
            activation,
            block,
            early,
            launch_pdl=early,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@bound
@triton.jit
def _act_and_mul_kernel(
    x_ptr,
    out_ptr,
    d,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    early_launch.start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < d
    gate = tl.load(x_ptr + row * 2 * d + col, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * d + d + col, mask=mask).to(tl.float32)
    if ACTIVATION == "silu":
        weight = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        weight = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        weight = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + row * d + col, gate * weight * up, mask=mask)

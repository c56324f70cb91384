"""Rotary position embedding: the angles of a step, and the rotation. Variants of RoPE differ only
in the inverse frequencies that they pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

BLOCK = 128  # angles per program, one per thread: bound by arithmetic, not by memory


def rope_angles(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Tensor:
    """Return cosines and sines of every token's angles, once per step for all layers.

    An angle is the product in float32, rounded as in Hugging Face's models.

    Args:
        positions: contiguous int32 [num_tokens], token indices.
        inverse_frequencies: contiguous float32 [head_dim / 2].
        scale: factor of both (YaRN's attention factor, else 1.0).
    Returns:
        float32 [2, num_tokens, head_dim / 2]: cosines, sines.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    for name, tensor, dtype in (
        ("positions", positions, torch.int32),
        ("inverse_frequencies", inverse_frequencies, torch.float32),
    ):
        if tensor.ndim != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: contiguous {dtype} [n] expected, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if device.uses_triton(positions):
        return rope_angles_triton(positions, inverse_frequencies, scale)
    if (compiled := device.compiled(positions)) is not None:
        return compiled.rope_angles(positions, inverse_frequencies, scale)
    return rope_angles_reference(positions, inverse_frequencies, scale)


def rope_angles_reference(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Tensor:
    angles = torch.outer(positions.float(), inverse_frequencies)
    return torch.stack((angles.cos(), angles.sin())).mul_(scale)


def rotate_reference(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate [num_tokens, heads, head_dim] by angles [2, num_tokens, pairs], with numbers i and i +
    pairs as a pair. Numbers after the first 2 * pairs do not change.

    Computed in float32 and rounded once, which is closer to the exact rotation than Hugging Face's
    bfloat16 one.
    """
    cos, sin = angles[0].unsqueeze(1), angles[1].unsqueeze(1)
    pairs = angles.shape[2]
    wide = x.float()
    low, high, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    turned = low * cos - high * sin, high * cos + low * sin
    return torch.cat((*turned, rest), dim=-1).to(x.dtype)


def rope_angles_triton(positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Tensor:
    num_tokens, half = positions.shape[0], inverse_frequencies.shape[0]
    angles = torch.empty(2, num_tokens, half, dtype=torch.float32, device=positions.device)
    if num := num_tokens * half:
        _rope_angles_kernel[(triton.cdiv(num, BLOCK),)](
            positions,
            inverse_frequencies,
            angles,
            scale,
            num,
            half,
            BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return angles


@bound
@triton.jit(do_not_specialize=["positions_ptr", "num"])
def _rope_angles_kernel(
    positions_ptr,
    frequencies_ptr,
    angles_ptr,
    scale,
    num,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `num` angles of all tokens, flattened.

    tl.cos and tl.sin reduce their argument exactly, because they compile to the accurate functions
    of CUDA's library, not to the hardware's approximations.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num
    position = tl.load(positions_ptr + place // HALF, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + place % HALF, mask=mask, other=0.0)
    tl.store(angles_ptr + place, tl.cos(angle) * scale, mask=mask)
    tl.store(angles_ptr + num + place, tl.sin(angle) * scale, mask=mask)

"""Lookup of token embeddings, also for sampled tokens that only the device knows yet."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound


def embed(token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
    """Look up token embeddings. Tokens that the CPU does not know yet are read from the future map.

    Args:
        token_ids: contiguous int32 [num_tokens]: a token, or -(slot + 1) for the last token sampled
            in `slot`.
        future: contiguous int32 [num_slots], with a valid token in every slot that token_ids names.
        weight: [vocabulary, hidden], rows may be strided.
    Returns:
        [num_tokens, hidden] of weight's dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    for name, tensor in (("token_ids", token_ids), ("future", future)):
        if tensor.ndim != 1 or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: contiguous int32 [n] expected, got {_describe(tensor)}")
    if weight.ndim != 2 or weight.stride(1) != 1:
        raise ValueError(f"weight: [vocabulary, hidden] expected, got {_describe(weight)}")
    if device.uses_triton(weight):
        return embed_triton(token_ids, future, weight)
    if (compiled := device.compiled(weight)) is not None:
        return compiled.embed(token_ids, future, weight)
    return embed_reference(token_ids, future, weight)


def embed_reference(token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
    from_future = future.index_select(0, (-token_ids - 1).clamp_(min=0))
    return weight.index_select(0, torch.where(token_ids < 0, from_future, token_ids))


def embed_triton(token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
    num_tokens, hidden = token_ids.shape[0], weight.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(hidden))  # 16 bytes per thread for 16-bit weights
        _embed_kernel[(num_tokens, triton.cdiv(hidden, block))](
            token_ids,
            future,
            weight,
            out,
            weight.stride(0),
            hidden,
            block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@bound
@triton.jit(do_not_specialize=["token_ids_ptr"])
def _embed_kernel(
    token_ids_ptr,
    future_ptr,
    weight_ptr,
    out_ptr,
    weight_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of columns of one token's embedding."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids_ptr + place)
    future = tl.load(future_ptr - 1 - token, mask=token < 0, other=0)
    row = tl.where(token < 0, future, token).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < HIDDEN
    values = tl.load(weight_ptr + row * weight_stride + col, mask=mask)
    tl.store(out_ptr + place * HIDDEN + col, values, mask=mask)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"

"""Gated feed-forward nets of experts: every token goes through the experts that it is routed to.

Pairs of token and expert are sorted by expert, and two grouped products process them. Each token's
results are added in the order of its experts, so no sum depends on the device's scheduling.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels import device
from kernels.experts.grouped_kernels import (
    GROUP_BLOCK,
    SUM_BLOCK,
    add_pairs_kernel,
    down_kernel,
    gate_up_kernel,
    group_kernel,
    tile_for,
)
from kernels.layers.act_and_mul import Activation, act_and_mul
from kernels.row_search import SEARCH_BLOCK

LIMIT, SLOPE = 7.0, 1.702  # of "clamped"

# clamped: gate * sigmoid(SLOPE * gate) * (up + 1), with gate at most LIMIT and up within ±LIMIT.
Gate: TypeAlias = Activation | Literal["clamped"]


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return the sum over j of weights[:, j] * down[ids[:, j]] (act(gate) * up).

    gate and up are products with gate_up[ids[:, j]], and `gate` selects act. The call does not wait
    for the device, and its launches do not depend on the routing.

    Args:
        x: contiguous [n, hidden].
        gate_up: contiguous [experts, 2 * inner, hidden] of x's dtype, the gate's rows first.
        down: contiguous [experts, hidden, inner] of x's dtype.
        weights: contiguous float32 [n, k].
        ids: contiguous int32 [n, k], each below the number of experts, or that number for a pair
            that adds nothing and has the weight 0.
        gate_up_bias, down_bias: contiguous [experts, 2 * inner] and [experts, hidden].
    Returns:
        [n, hidden] of x's dtype. The sum is in float32, of parts that are rounded to x's dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    n, hidden = x.shape
    num_experts, inner = down.shape[0], down.shape[2]
    if gate_up.shape != (num_experts, 2 * inner, hidden) or down.shape[1] != hidden:
        raise ValueError(
            f"experts {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit x {tuple(x.shape)}"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"experts of {gate_up.dtype}, {down.dtype} do not fit x of {x.dtype}")
    if ids.shape != weights.shape or ids.shape[:1] != (n,) or ids.ndim != 2:
        raise ValueError(f"weights, ids: [{n}, k], got {tuple(weights.shape)}, {tuple(ids.shape)}")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"weights float32, ids int32 expected, got {weights.dtype}, {ids.dtype}")
    for bias, matrices in ((gate_up_bias, gate_up), (down_bias, down)):
        if bias is not None and bias.shape != matrices.shape[:2]:
            raise ValueError(f"biases {tuple(bias.shape)} do not fit {tuple(matrices.shape)}")
    given = (x, gate_up, down, weights, ids, gate_up_bias, down_bias)
    if not all(tensor is None or tensor.is_contiguous() for tensor in given):
        raise ValueError("all arguments must be contiguous")
    implementation = grouped_mlp_triton if device.uses_triton(x) else grouped_mlp_reference
    return implementation(x, gate_up, down, weights, ids, gate, gate_up_bias, down_bias)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Return act(gate) * up of [n, 2 * inner] as [n, inner], like `act_and_mul`, in float32,
    rounded once."""
    if gate != "clamped":
        return act_and_mul(x, gate)
    if (compiled := device.compiled(x)) is not None:
        return compiled.act_and_mul(x, gate)
    opening, up = x.float().chunk(2, dim=-1)
    opening, up = opening.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (opening * torch.sigmoid(opening * SLOPE) * (up + 1)).to(x.dtype)


def grouped_mlp_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    def linear(of_it: Tensor, matrices: Tensor, biases: Tensor | None, expert: int) -> Tensor:
        return F.linear(of_it, matrices[expert], None if biases is None else biases[expert])

    def net(expert: int, rows: Tensor) -> Tensor:
        inner = gated(linear(rows, gate_up, gate_up_bias, expert), gate)
        return linear(inner, down, down_bias, expert)

    return by_expert(x, weights, ids, net, len(down))


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    net: Callable[[int, Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """Return the same sum with `net(expert, its rows of x)` for each expert that is used. With
    compiled operations, no token affects the bits of another if no row of `net` does.

    Reads from the device which experts are used, so it is for CPUs.
    """
    n, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // k)
    parts = torch.empty_like(rows)  # contiguous for each expert, and scattered once at the end
    start = 0
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            end = start + count
            parts[start:end] = net(expert, rows[start:end])
            start = end
    parts[start:] = 0
    places = order.argsort().view(n, k)
    if (compiled := device.compiled(x)) is not None:
        return compiled.add_experts(parts, places, weights)
    by_token = parts[places]
    return torch.bmm(weights.unsqueeze(1), by_token.float()).squeeze(1).to(x.dtype)


def grouped_mlp_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    (n, hidden), k = x.shape, ids.shape[1]
    num_experts, inner, num_pairs = down.shape[0], down.shape[2], ids.numel()
    out = torch.empty_like(x)
    if not out.numel():
        return out
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    group_kernel[(num_experts,)](ids, starts, order, num_pairs, GROUP_BLOCK, num_warps=4,
                                 enable_fp_fusion=True)  # fmt: skip
    tile = tile_for(x.element_size(), num_pairs, num_experts, device.architecture())
    num_tiles = num_pairs // tile.rows + num_experts  # each expert's last tile may be partial
    between = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    common = {
        "BLOCK_M": tile.rows,
        "BLOCK_K": tile.depth,
        "SEARCH_BLOCK": SEARCH_BLOCK,
        "UPCAST": device.INTERPRETED,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    gate_up_kernel[(num_tiles, triton.cdiv(inner, tile.columns // 2))](
        x,
        gate_up,
        gate_up_bias,
        between,
        starts,
        order,
        num_experts,
        K=k,
        HIDDEN=hidden,
        INNER=inner,
        ACTIVATION=gate,
        LIMIT=LIMIT,
        SLOPE=SLOPE,
        BLOCK_N=tile.columns // 2,
        **common,
    )
    down_kernel[(num_tiles, triton.cdiv(hidden, tile.columns))](
        between,
        down,
        down_bias,
        weights,
        parts,
        starts,
        order,
        num_experts,
        HIDDEN=hidden,
        INNER=inner,
        BLOCK_N=tile.columns,
        **common,
    )
    add_pairs_kernel[(n, triton.cdiv(hidden, SUM_BLOCK))](
        parts,
        ids,
        out,
        num_experts,
        K=k,
        HIDDEN=hidden,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out

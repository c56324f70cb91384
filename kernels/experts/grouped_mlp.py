"""Gated feed-forward nets of experts (MoE): every token goes through the experts to which it is
routed.

(token, expert) pairs are sorted by expert, and two grouped products process them. Each token's
results are added in the order of its experts, so no sum depends on the device's scheduling.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
from kernels.layers.quantised_linear import quantised_linear
from kernels.quantised import NOT_QUANTISED, Quantisation, num_inputs
from kernels.row_search import SEARCH_BLOCK

LIMIT, SLOPE = 7.0, 1.702  # parameters of "clamped"

# clamped: gate * sigmoid(SLOPE * gate) * (up + 1), with gate at most LIMIT and up within ±LIMIT.
Gate: TypeAlias = Activation | Literal["clamped"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One matrix of each expert.

    Attributes:
        numbers: contiguous [experts, out, in], or [experts, out, in / 2] in 4 bits.
        bias: contiguous [experts, out].
        quantisation: None: the numbers are weights of the inputs' dtype.
    """

    numbers: Tensor
    bias: Tensor | None = None
    quantisation: Quantisation | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        count, rows, columns = self.numbers.shape
        return count, rows, columns if self.quantisation is None else num_inputs(self.numbers)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        if self.quantisation is None:
            return self.numbers, self.bias
        return self.numbers, self.bias, self.quantisation.scales, self.quantisation.zeros

    @property
    def arguments(self) -> dict[str, Any]:
        """Return a kernel's arguments."""
        quantisation = self.quantisation
        own = NOT_QUANTISED if quantisation is None else quantisation.arguments(self.numbers)
        return {"bias_ptr": self.bias, **own}

    def product(self, expert: int, x: Tensor) -> Tensor:
        numbers, bias = self.numbers[expert], None if self.bias is None else self.bias[expert]
        if self.quantisation is None:
            return F.linear(x, numbers, bias)
        one = self.quantisation.with_tensors(lambda each: each[expert])
        return quantised_linear(x, numbers, one, bias)

    def check(self, dtype: torch.dtype) -> None:
        """Raise ValueError if the tensors do not fit each other, or inputs of this dtype."""
        if not all(each is None or each.is_contiguous() for each in self.tensors):
            raise ValueError("experts must be contiguous")
        if self.bias is not None and self.bias.shape != self.numbers.shape[:2]:
            shapes = tuple(self.bias.shape), tuple(self.numbers.shape)
            raise ValueError(f"biases {shapes[0]} do not fit {shapes[1]}")
        if self.quantisation is not None:
            self.quantisation.check(self.numbers)
        elif self.numbers.dtype != dtype:
            raise ValueError(f"experts of {self.numbers.dtype} do not fit x of {dtype}")


def grouped_mlp(
    x: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
) -> Tensor:
    """Return the sum over j of weights[:, j] * down[ids[:, j]] (act(gate) * up).

    gate and up are products with gate_up[ids[:, j]], and `gate` selects act. Does not wait for the
    device, and the launches do not depend on the routing.

    Args:
        x: contiguous [n, hidden].
        gate_up: [experts, 2 * inner, hidden], the gate's rows first.
        down: [experts, hidden, inner].
        weights: contiguous float32 [n, k].
        ids: contiguous int32 [n, k], each below the number of experts, or equal to it for a pair
            that adds nothing and has weight 0.
    Returns:
        [n, hidden] of x's dtype. The sum is in float32, of parts rounded to x's dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    n, hidden = x.shape
    num_experts, width, inner = down.shape
    if gate_up.shape != (num_experts, 2 * inner, hidden) or width != hidden:
        raise ValueError(f"experts {gate_up.shape} and {down.shape} do not fit x {tuple(x.shape)}")
    if ids.shape != weights.shape or ids.shape[:1] != (n,) or ids.ndim != 2:
        raise ValueError(f"weights, ids: [{n}, k], got {tuple(weights.shape)}, {tuple(ids.shape)}")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"weights float32, ids int32 expected, got {weights.dtype}, {ids.dtype}")
    if not all(tensor.is_contiguous() for tensor in (x, weights, ids)):
        raise ValueError("all arguments must be contiguous")
    for matrices in (gate_up, down):
        matrices.check(x.dtype)
    implementation = grouped_mlp_triton if device.uses_triton(x) else grouped_mlp_reference
    return implementation(x, gate_up, down, weights, ids, gate)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Return act(gate) * up of [n, 2 * inner] as [n, inner], in float32, rounded once."""
    if gate != "clamped":
        return act_and_mul(x, gate)
    if (compiled := device.compiled(x)) is not None:
        return compiled.act_and_mul(x, gate)
    opening, up = x.float().chunk(2, dim=-1)
    opening, up = opening.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (opening * torch.sigmoid(opening * SLOPE) * (up + 1)).to(x.dtype)


def grouped_mlp_reference(
    x: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
) -> Tensor:
    def net(expert: int, rows: Tensor) -> Tensor:
        return down.product(expert, gated(gate_up.product(expert, rows), gate))

    return by_expert(x, weights, ids, net, down.shape[0])


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    net: Callable[[int, Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """Return the same sum, with `net(expert, its rows of x)` called for each used expert. With
    compiled operations, no token affects the bits of another if no row of `net` does.

    Reads the used experts from the device, so it is meant for CPUs.
    """
    n, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // k)
    parts = torch.empty_like(rows)  # contiguous for each expert, scattered once at the end
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
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    weights: Tensor,
    ids: Tensor,
    gate: Gate,
) -> Tensor:
    (n, hidden), k = x.shape, ids.shape[1]
    num_experts, _, inner = down.shape
    num_pairs = ids.numel()
    out = torch.empty_like(x)
    if not out.numel():
        return out
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    group_kernel[(num_experts,)](ids, starts, order, num_pairs, GROUP_BLOCK, num_warps=4,
                                 enable_fp_fusion=True)  # fmt: skip
    first, second = gate_up.arguments, down.arguments
    group = math.gcd(first["GROUP"], second["GROUP"])
    tile = tile_for(x.element_size(), num_pairs, num_experts, device.architecture(), group)
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
        gate_up.numbers,
        between_ptr=between,
        starts_ptr=starts,
        order_ptr=order,
        num_experts=num_experts,
        K=k,
        HIDDEN=hidden,
        INNER=inner,
        ACTIVATION=gate,
        LIMIT=LIMIT,
        SLOPE=SLOPE,
        BLOCK_N=tile.columns // 2,
        **first,
        **common,
    )
    down_kernel[(num_tiles, triton.cdiv(hidden, tile.columns))](
        between,
        down.numbers,
        weights_ptr=weights,
        parts_ptr=parts,
        starts_ptr=starts,
        order_ptr=order,
        num_experts=num_experts,
        HIDDEN=hidden,
        INNER=inner,
        BLOCK_N=tile.columns,
        **second,
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

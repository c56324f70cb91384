"""Routing of tokens to experts: each token's experts and their weights."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

MAX_EXPERTS = 1024
_NOTHING = 1e-20  # added to a sum of weights that may be 0


@dataclass(frozen=True, slots=True)
class Routing:
    """The parameters of a router.

    Attributes:
        k: experts per token.
        scores: function of the logits: a softmax over all experts, or a sigmoid of each.
        normalise: a token's weights add up to `scale`. False: they are its scores times `scale`.
        groups: number of equal groups of consecutive experts. A token's experts are in the
            `chosen_groups` groups with the largest sums of their `group_top` highest scores.
    Source: the groups: DeepSeek-V2, 2024, section 2.2.2, and DeepSeek-V3, section 2.1.2.
    """

    k: int
    normalise: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_top: Literal[1, 2] = 1


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k likeliest experts of each token, likeliest first, in undefined order if equal.

    Args:
        logits: contiguous [n, experts].
        bias: contiguous float32 [experts], added to scores to choose experts, but not in weights.
    Returns:
        Weights, float32 [n, k], and distinct ids, int32 [n, k]. For a token with logits that are
        not finite, weights are NaN and ids are any valid ones.
    Raises:
        ValueError: wrong shapes, or numbers that do not fit each other.
    """
    if logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"logits: contiguous [n, experts] expected, got {tuple(logits.shape)}")
    num_experts = logits.shape[1]
    if not 1 <= routing.k <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{routing.k} of {num_experts} experts; there may be {MAX_EXPERTS}")
    size, odd = divmod(num_experts, routing.groups)
    if odd or not 1 <= routing.chosen_groups <= routing.groups or size < routing.group_top:
        raise ValueError(f"{num_experts} experts do not fit {routing}")
    if routing.k > routing.chosen_groups * size:
        raise ValueError(f"{routing.k} experts of {routing.chosen_groups} groups of {size}")
    if bias is not None and (bias.shape != (num_experts,) or bias.dtype != torch.float32):
        raise ValueError(f"bias: float32 [{num_experts}], got {bias.dtype} {tuple(bias.shape)}")
    if device.uses_triton(logits):
        return route_triton(logits, routing, bias)
    if (compiled := device.compiled(logits)) is not None:
        return compiled.route(
            logits,
            bias,
            routing.k,
            sigmoid=routing.scores == "sigmoid",
            normalise=routing.normalise,
            scale=routing.scale,
            groups=routing.groups,
            chosen_groups=routing.chosen_groups,
            group_top=routing.group_top,
        )
    return route_reference(logits, routing, bias)


def route_reference(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        sums = grouped.topk(routing.group_top, -1).values.sum(-1)
        kept = torch.zeros_like(sums, dtype=torch.bool)
        kept.scatter_(1, sums.topk(routing.chosen_groups, -1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(routing.k, -1).indices
    weights = scores.gather(1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _NOTHING)
    return weights * routing.scale, ids.int()


def route_triton(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    (n, num_experts), k = logits.shape, routing.k
    weights = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, k, dtype=torch.int32, device=logits.device)
    if n:
        _route_kernel[(n,)](
            logits,
            bias,
            weights,
            ids,
            NUM_EXPERTS=num_experts,
            K=k,
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK=triton.next_power_of_2(num_experts),
            SIGMOID=routing.scores == "sigmoid",
            NORMALISE=routing.normalise,
            SCALE=routing.scale,
            GROUPS=routing.groups,
            CHOSEN_GROUPS=routing.chosen_groups,
            BLOCK_GROUPS=triton.next_power_of_2(routing.groups),
            GROUP_TOP=routing.group_top,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return weights, ids


@bound
@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
):
    """Route one token, by taking the largest score K times, because K and the row are small."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    places = tl.arange(0, BLOCK_K)
    inside = experts < NUM_EXPERTS
    # Lanes beyond the experts get no score and are never chosen.
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + experts, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_groups(
            choice, experts, NUM_EXPERTS // GROUPS, GROUPS, CHOSEN_GROUPS, BLOCK_GROUPS, GROUP_TOP
        )
    weights = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(K):
        # In a row of NaN any lane may be the largest, even one beyond the experts.
        best = tl.minimum(tl.argmax(choice, 0), NUM_EXPERTS - 1)
        weight = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        weights = tl.where(places == place, weight, weights)
        ids = tl.where(places == place, best, ids)
        choice = tl.where(experts == best, float("-inf"), choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    # Not from a maximum, which ignores NaN: a token with NaN logits must get NaN weights.
    total = tl.sum(scores, 0)
    weights = tl.where(total == total, weights * SCALE, float("nan"))
    wanted = places < K
    tl.store(weights_ptr + row * K + places, weights, mask=wanted)
    tl.store(ids_ptr + row * K + places, ids, mask=wanted)


@triton.jit
def _in_groups(
    choice,
    experts,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
):
    """Return `choice`, with -inf in all groups except the best."""
    groups = tl.arange(0, BLOCK_GROUPS)
    sums = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(experts // SIZE == group, choice, float("-inf"))
        best = tl.max(own, 0)
        if GROUP_TOP == 2:
            best += tl.max(tl.where(experts == tl.argmax(own, 0), float("-inf"), own), 0)
        sums = tl.where(groups == group, best, sums)
    kept = experts < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = tl.argmax(sums, 0)
        kept = kept | (experts // SIZE == best)
        sums = tl.where(groups == best, float("-inf"), sums)
    return tl.where(kept, choice, float("-inf"))

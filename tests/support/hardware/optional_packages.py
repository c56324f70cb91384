"""Fakes of optional packages: signatures as recorded, and results computed in float64.

They reject calls that the packages reject or would compute wrongly.
"""

import abc
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.hardware.recorded import Recorded

FLASHINFER, FLA = Recorded("flashinfer"), Recorded("fla")
LAYOUT = "HND"


class Wrapper(abc.ABC):
    """A fake FlashInfer wrapper for keys and values in pages, with one plan at a time.

    Attributes:
        plans: plans of all wrappers, in the order in which they were made.
    """

    name: str
    plan_name = "plan"
    plans: list["Wrapper"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = FLASHINFER.bind(self.name, *args, **kwargs)
        workspace = options["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8 and workspace.nbytes >= 128 << 20
        assert not workspace.any() and not options.get("use_cuda_graph")
        assert options.get("kv_layout", LAYOUT) == LAYOUT
        self.planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = FLASHINFER.bind(f"{self.name}.{self.plan_name}", *args, **kwargs)
        self.plans.append(self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        asked = FLASHINFER.bind(f"{self.name}.run", *args, **kwargs)
        out, sums = self.attend(asked, self.planned)
        return (out, sums) if asked.get("return_lse") else out

    @abc.abstractmethod
    def attend(self, asked: dict[str, Any], planned: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return outputs and the logarithms of the sums of attention weights."""


class Extend(Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def attend(self, asked: dict[str, Any], planned: dict[str, Any]) -> tuple[Tensor, Tensor]:
        starts = planned["qo_indptr"]
        assert planned["causal"]
        return _paged(asked, starts, {**planned, "head_dim": planned["head_dim_qk"]})


class Decode(Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    plan_name = "_plan_impl"

    def attend(self, asked: dict[str, Any], planned: dict[str, Any]) -> tuple[Tensor, Tensor]:
        named = {
            f"paged_kv_{name}": planned[name] for name in ("indptr", "indices", "last_page_len")
        }
        starts = torch.arange(len(planned["last_page_len"]) + 1, dtype=torch.int32)
        return _paged(asked, starts, {**planned, **named})


class Latent(Wrapper):
    name = "mla.BatchMLAPagedAttentionWrapper"

    def attend(self, asked: dict[str, Any], planned: dict[str, Any]) -> tuple[Tensor, Tensor]:
        rows, q, kv = planned["metadata"], asked["query"], asked["kv_cache"]
        value_dim, size = planned["head_dim_ckv"], planned["page_size"]
        assert planned["causal"] and planned["head_dim_kpe"] == q.shape[2] - value_dim
        assert kv.shape[1] == size and q.shape[1] == planned["num_heads"]
        _check_dtypes(planned, q, kv)
        keys = _keys(kv[:, None], rows["kv_indptr"], rows["kv_indices"], rows["kv_len_arr"], size)
        values = [each[..., :value_dim] for each in keys]
        return _attention(q, keys, values, rows["qo_indptr"], planned["sm_scale"])


def flashinfer() -> Any:
    """Return a module `flashinfer`, whose `plans` lists the wrappers that were planned."""
    plans: list[Wrapper] = []

    def of(kind: type[Wrapper]) -> type[Wrapper]:
        return type(kind.__name__, (kind,), {"plans": plans})

    def csr(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return FLASHINFER.bind("mla.MLAPlanMetadata.csr", *args, **kwargs)

    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=of(Extend),
        BatchDecodeWithPagedKVCacheWrapper=of(Decode),
        mla=SimpleNamespace(
            BatchMLAPagedAttentionWrapper=of(Latent), MLAPlanMetadata=SimpleNamespace(csr=csr)
        ),
        plans=plans,
    )


def _paged(asked: dict[str, Any], starts: Tensor, planned: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, (k_cache, v_cache) = asked["q"], asked["paged_kv_cache"]
    size, kv_heads = planned["page_size"], planned["num_kv_heads"]
    assert k_cache.shape[1:] == (kv_heads, size, planned["head_dim"]) == v_cache.shape[1:]
    assert q.shape == (int(starts[-1]), planned["num_qo_heads"], planned["head_dim"])
    _check_dtypes(planned, q, k_cache)
    firsts, last = planned["paged_kv_indptr"], planned["paged_kv_last_page_len"]
    counts = firsts.diff()
    assert bool(((last >= 1) & (last <= size) | (counts == 0) & (last == 0)).all())
    lengths = (counts - 1).clamp(min=0) * size + last
    of_row = (firsts, planned["paged_kv_indices"], lengths, size)
    group = q.shape[1] // kv_heads
    return _attention(
        q,
        [each.repeat_interleave(group, 0) for each in _keys(k_cache, *of_row)],
        [each.repeat_interleave(group, 0) for each in _keys(v_cache, *of_row)],
        starts,
        planned["sm_scale"],
        planned.get("window_left", -1),
        planned.get("logits_soft_cap"),
    )


def _check_dtypes(planned: dict[str, Any], q: Tensor, kv: Tensor) -> None:
    assert (planned["q_data_type"], planned["kv_data_type"]) == (q.dtype, kv.dtype)


def _keys(
    cache: Tensor, firsts: Tensor, indices: Tensor, lengths: Tensor, size: int
) -> list[Tensor]:
    """Return the vectors of each row, [kv_heads, length, any]."""
    for each in (firsts, indices, lengths):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert len(indices) == firsts[-1] and bool((lengths <= firsts.diff() * size).all())
    rows = indices.split(firsts.diff().tolist())
    return [
        cache.double()[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length]
        for pages, length in zip(rows, lengths.tolist(), strict=True)
    ]


def _attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    starts: Tensor,
    scale: float,
    window_left: int = -1,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs, and the logarithms to base 2 of the sums of attention weights."""
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    out, sums = [], []
    for own, k, v in zip(q.double().split(starts.diff().tolist()), keys, values, strict=True):
        scores = torch.einsum("qhd,hkd->hqk", own, k.expand(q.shape[1], -1, -1)) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        places = torch.arange(k.shape[1], device=q.device)
        last = places[k.shape[1] - len(own) :, None]
        hidden = places > last
        if window_left >= 0:
            hidden |= places < last - window_left
        scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out.append(torch.einsum("hqk,hkd->qhd", weights, v.expand(q.shape[1], -1, -1)))
        sums.append(scores.logsumexp(-1).t() / math.log(2.0))
    return torch.cat(out).to(q.dtype), torch.cat(sums).float()


def fla() -> Any:
    """Return a module `fla.ops.gated_delta_rule`, whose `calls` counts its computations."""
    module = SimpleNamespace(calls=0)

    def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        module.calls += 1
        return _delta_rule(**FLA.bind("chunk_gated_delta_rule", *args, **kwargs))

    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    return module


def _delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule token by token."""
    bounds = cu_seqlens_cpu.tolist()
    assert output_final_state and use_qk_l2norm_in_kernel
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens.tolist() == bounds
    assert bool((cu_seqlens_cpu.diff() > 0).all()) and cu_seqlens_cpu.device.type == "cpu"
    assert (len(q), q.shape[1], len(initial_state)) == (1, bounds[-1], len(bounds) - 1)
    assert initial_state.dtype == torch.float32
    group = v.shape[2] // q.shape[2]
    q, k = (each[0].double().repeat_interleave(group, 1) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    out, states = torch.empty_like(v[0], dtype=torch.float64), []
    for state, start, end in zip(initial_state.double(), bounds, bounds[1:], strict=False):
        for t in range(start, end):
            state = state * g[0, t].double().exp()[:, None, None]
            learnt = v[0, t].double() - torch.einsum("hk,hkv->hv", k[t], state)
            learnt *= beta[0, t].double()[:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], learnt)
            out[t] = torch.einsum("hk,hkv->hv", q[t] * scale, state)
        states.append(state)
    return out[None].to(v.dtype), torch.stack(states).float()

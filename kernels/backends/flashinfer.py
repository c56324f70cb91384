"""Attention of the package flashinfer-python.

A wrapper of the package is planned once for the rows of a step, and runs for each layer. Planning
on the host waits for the device, so no CUDA graph can contain it.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import AttentionPlan, check_kv
from kernels.attention.reference import gated
from kernels.backends.package import Package

PACKAGE = Package("flashinfer-python", "flashinfer", "0.7")
HEAD_DIMS = frozenset({64, 128, 256})
LATENT_DIMS = (512, 64)  # numbers of a latent: value, rotated part

_WORKSPACE_BYTES = 128 << 20  # recommended by the package
_LAYOUT = "HND"  # order of dimensions in a page: head, token, number
_LN_2 = 0.6931471805599453


class FlashInfer:
    """The package's wrappers on one device, with a shared workspace.

    All calls must use one stream, because wrappers write to the workspace.

    Args:
        package: the module `flashinfer`.
    """

    def __init__(self, package: Any, device: torch.device) -> None:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._metadata = package.mla.MLAPlanMetadata
        self._extend = _Wrappers(
            lambda: package.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout=_LAYOUT)
        )
        self._decode = _Wrappers(
            lambda: package.BatchDecodeWithPagedKVCacheWrapper(
                workspace, kv_layout=_LAYOUT, use_tensor_cores=True
            )
        )
        self._latent = _Wrappers(lambda: package.mla.BatchMLAPagedAttentionWrapper(workspace))

    @classmethod
    def open(cls, device: torch.device) -> "FlashInfer":
        """Import the package, and allocate the workspace. Raises Unavailable."""
        return cls(PACKAGE.load(), device)

    def plan_attention(self, step: AttentionRows, kv: Tensor, kind: AttentionKind) -> AttentionPlan:
        """Plan attention, see `kernels.attention.paged.plan_attention`."""
        check_kv(kv, kind.value_dim)
        rows = _Rows.of(step, kv.shape[3], kind.window)
        if kind.value_dim is not None:
            return _LatentPlan(rows, step.num_tokens, kind.value_dim, self._latent, self._metadata)
        if step.num_extends:
            return _PagedPlan(step.num_tokens, self._extend, rows.plan_extend)
        return _PagedPlan(step.num_tokens, self._decode, rows.plan_decode)


class _Wrappers:
    """A pool of wrappers of one kind. A wrapper has the buffers of one plan, so only one plan may
    use it at a time.

    Planning waits for the device before it writes the buffers, so no kernel still reads them.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []

    def acquire(self, holder: object) -> Any:
        """Return a wrapper. It returns to the pool when `holder` is garbage-collected."""
        wrapper = self._free.pop() if self._free else self._make()
        weakref.finalize(holder, self._free.append, wrapper).atexit = False
        return wrapper


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step in the form of the package. Pages outside the attention window are left
    out, which changes no position, because the package counts positions from the end of a row.

    Attributes:
        query_starts, page_starts: int32 [num_rows + 1] on the host, from 0 without gaps.
        lengths: int32 [num_rows] on the host, tokens in the row's pages.
        page_ids: int32 [page_starts[-1]] on the device.
        window_left: earlier tokens that a query sees. -1: all.
    """

    query_starts: Tensor
    page_starts: Tensor
    page_ids: Tensor
    lengths: Tensor
    page_size: int
    window_left: int

    @classmethod
    def of(cls, step: AttentionRows, page_size: int, window: int | None) -> "_Rows":
        num_rows, page_ids = step.num_rows, step.page_ids
        # One copy, so that the host waits once.
        columns = torch.cat((step.query_starts, step.lengths, step.page_starts)).cpu()
        starts, ends, places = torch.split(columns, [num_rows + 1, num_rows, num_rows])
        unseen = torch.zeros_like(ends)
        if window is not None:
            unseen = (ends - starts.diff() - window + 1).clamp(min=0) // page_size
        counts = (ends + page_size - 1) // page_size - unseen
        firsts = F.pad(counts.cumsum(0), (1, 0)).int()
        found = (places + unseen - firsts[:-1]).repeat_interleave(counts)
        found += torch.arange(len(found), dtype=torch.int32)
        return cls(
            starts,
            firsts,
            page_ids.index_select(0, found.to(page_ids.device)),
            ends - unseen * page_size,
            page_size,
            -1 if window is None else window - 1,
        )

    @property
    def last_page_lengths(self) -> Tensor:
        """Return the tokens in the last page of each row: int32, 0 for a row without pages."""
        return self.lengths - (self.page_starts.diff() - 1).clamp(min=0) * self.page_size

    def plan_extend(self, wrapper: Any, q: Tensor, kv: Tensor, **numbers: Any) -> None:
        wrapper.plan(
            self.query_starts,
            self.page_starts,
            self.page_ids,
            self.last_page_lengths,
            q.shape[1],
            kv.shape[1],
            kv.shape[4],
            self.page_size,
            causal=True,
            window_left=self.window_left,
            q_data_type=q.dtype,
            kv_data_type=kv.dtype,
            **numbers,
        )

    def plan_decode(self, wrapper: Any, q: Tensor, kv: Tensor, **numbers: Any) -> None:
        wrapper.plan(
            self.page_starts,
            self.page_ids,
            self.last_page_lengths,
            q.shape[1],
            kv.shape[1],
            kv.shape[4],
            self.page_size,
            window_left=self.window_left,
            q_data_type=q.dtype,
            kv_data_type=kv.dtype,
            **numbers,
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _PagedPlan:
    """A plan of attention over keys and values. A plan of the package has one scale and one soft
    cap. The first layer with new values makes it, and later layers share it.
    """

    num_tokens: int
    wrappers: _Wrappers
    plan: Callable[..., None]
    planned: dict[tuple[float, float | None], Any] = field(default_factory=dict)

    @property
    def value_dim(self) -> None:
        return None

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        key = scoring.scale, scoring.soft_cap
        wrapper, sinks = self.planned.get(key), scoring.sinks
        if wrapper is None:
            wrapper = self.planned[key] = self.wrappers.acquire(self)
            self.plan(wrapper, q, kv, sm_scale=scoring.scale, logits_soft_cap=scoring.soft_cap)
        pages = (kv[:, :, 0], kv[:, :, 1])
        if sinks is None:
            return gated(wrapper.run(q, pages).flatten(1), gate)
        out, sums = wrapper.run(q, pages, return_lse=True)
        # The sink takes a share of all weights. The package returns base-2 logarithms of sums.
        share = torch.sigmoid(sums * _LN_2 - sinks.float())
        return gated((out * share.unsqueeze(-1)).to(q.dtype).flatten(1), gate)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _LatentPlan:
    """A plan of attention over latents (MLA). The first layer with a new scale makes it."""

    rows: _Rows
    num_tokens: int
    value_dim: int
    wrappers: _Wrappers
    metadata: Any
    planned: dict[float, Any] = field(default_factory=dict)

    def attend(self, q: Tensor, kv: Tensor, scoring: Scoring, gate: Tensor | None) -> Tensor:
        if scoring.soft_cap is not None or scoring.sinks is not None:
            raise ValueError("soft_cap and sinks are not supported with latents")
        if not self.num_tokens:
            return q.new_empty(0, q.shape[1] * self.value_dim)
        wrapper = self.planned.get(scoring.scale)
        if wrapper is None:
            rows = self.rows
            wrapper = self.planned[scoring.scale] = self.wrappers.acquire(self)
            wrapper.plan(
                metadata=self.metadata.csr(
                    rows.query_starts, rows.page_starts, rows.page_ids, rows.lengths
                ),
                num_heads=q.shape[1],
                head_dim_ckv=self.value_dim,
                head_dim_kpe=kv.shape[4] - self.value_dim,
                page_size=rows.page_size,
                causal=True,
                sm_scale=scoring.scale,
                q_data_type=q.dtype,
                kv_data_type=kv.dtype,
            )
        out: Tensor = wrapper.run(query=q, kv_cache=kv[:, 0, 0])
        return out.flatten(1)

"""The gated delta rule of the package flash-linear-attention, for prompts.

The package computes long rows in chunks. Decode steps and steps that verify drafts use Baton's
kernel, which CUDA graphs can contain.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends.package import Package
from kernels.linear_attention.delta_rule import Gates, delta_rule
from kernels.linear_attention.state_cells import CellView, StateRows

# The operations are in a separate distribution, with the release number of flash-linear-attention.
PACKAGE = Package("fla-core", "fla.ops.gated_delta_rule", "0.6")
LONGEST_KEY = 256


class FlashLinearAttention:
    """The delta rule of the package.

    Args:
        package: the module `fla.ops.gated_delta_rule`.
    """

    def __init__(self, package: Any) -> None:
        self._chunk_rule: Callable[..., tuple[Tensor, Tensor]] = package.chunk_gated_delta_rule

    @classmethod
    def open(cls) -> "FlashLinearAttention":
        """Import the package. Raises Unavailable."""
        return cls(PACKAGE.load())

    def delta_rule(self, x: Tensor, gates: Gates, cells: CellView, rows: StateRows) -> Tensor:
        """Compute the delta rule, see `kernels.linear_attention.delta_rule.delta_rule`."""
        if not rows.has_long_rows(len(x)):
            return delta_rule(x, gates, cells, rows)
        cut = _cut(rows)
        g = -gates.a_log.exp() * F.softplus(gates.a.flatten(1).float() + gates.dt_bias)
        beta = gates.b.flatten(1).float().sigmoid()
        if cut.order is not None:
            x, g, beta = x[cut.order], g[cut.order], beta[cut.order]
        k_size, v_size = cells.view.shape[2:]
        q, k, v = x[..., :k_size], x[..., k_size : 2 * k_size], x[..., 2 * k_size :]
        of_token = (q, k, v.reshape(len(x), cells.heads, v_size), g, beta)
        state, outputs = cells.read(rows.reads), []
        for part in cut.parts:
            if len(part.rows):  # empty if every mark is at the end of its row
                y, state[part.rows] = self._chunk_rule(
                    *(each[None, part.tokens] for each in of_token),
                    scale=k_size**-0.5,
                    initial_state=state[part.rows],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    cu_seqlens=part.starts,
                    cu_seqlens_cpu=part.starts_on_host,
                )
                outputs.append(y[0])
            cells.put(part.pages, state[part.written])
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if cut.order is None else out[cut.order.argsort()]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Consecutive tokens of some rows, one row after the other, and the states written after them.

    Attributes:
        tokens: slice of the tokens, in the order of the cut.
        rows: int64, the rows that have tokens in this part.
        starts, starts_on_host: int64 [len(rows) + 1], in tokens of the part.
        written: int64, the rows whose states are written.
        pages: int32 [len(written), state_pages].
    """

    tokens: slice
    rows: Tensor
    starts: Tensor
    starts_on_host: Tensor
    written: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The rows of a step, cut at their marks (see StateRows), because the package returns a state
    only at the end of a row.

    Attributes:
        order: int64, the step's tokens in the order of the parts. None: unchanged.
    """

    parts: tuple[_Part, ...]
    order: Tensor | None


@functools.lru_cache(maxsize=1)  # the layers of a step share their rows
def _cut(rows: StateRows) -> _Cut:
    """Cut the rows at their marks: first all tokens before marks, then all others."""
    device, num_rows = rows.starts.device, rows.num_rows
    columns = torch.cat((rows.starts, rows.marks, rows.kept[:, 0], rows.writes[:, 0])).cpu().long()
    sizes = [num_rows + 1, num_rows, num_rows, num_rows]
    starts, marks, kept, writes = torch.split(columns, sizes)
    begins, ends = starts[:-1], starts[1:]
    marked = marks > 0
    spans = ((begins, begins + marks, marked & (kept >= 0), rows.kept),) if marked.any() else ()
    parts, order, first = [], [], 0
    for begin, end, written, pages in (*spans, (begins + marks, ends, writes >= 0, rows.writes)):
        own = (end > begin).nonzero()[:, 0]
        counts = (end - begin)[own]
        offsets = F.pad(counts.cumsum(0), (1, 0))
        num_tokens = int(offsets[-1])
        order.append(
            (begin[own] - offsets[:-1]).repeat_interleave(counts) + torch.arange(num_tokens)
        )
        at = written.nonzero()[:, 0].to(device)
        tokens = slice(first, first + num_tokens)
        parts.append(_Part(tokens, own.to(device), offsets.to(device), offsets, at, pages[at]))
        first += num_tokens
    return _Cut(tuple(parts), torch.cat(order).to(device) if spans else None)

"""The interface between the scheduler and the runner: a batch, its launch, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.requests.logprobs import Logprobs
from common.requests.sampling import SamplingParams

Ints = NDArray[np.int32]


class ForwardMode(IntEnum):
    EXTEND = 1  # prompts, or chunks of prompts
    DECODE = 2  # one token per row
    MIXED = 3  # a chunk of a prompt, with decode rows in the same forward
    VERIFY = 4  # decode rows, some with drafts after their newest token
    IDLE = 5  # no rows: this node only takes part in a group's step (engine/loop/grouped.py)
    SPLIT = 6  # a group of layers of a split prefill


class LayerGroup(NamedTuple):
    """The layers [first, past) of a forward with `total` layers. A group without layers drops the
    forward."""

    first: int
    past: int
    total: int

    @property
    def is_last(self) -> bool:
        return self.past == self.total

    @property
    def drops(self) -> bool:
        return self.first == self.past

    @property
    def share(self) -> float:
        """Share of the forward's layers."""
        return (self.past - self.first) / self.total


@dataclass(frozen=True, slots=True, eq=False)
class PageCopies:
    """Copies of whole pages between the device pool and host memory: device[i] <-> host[i]."""

    device_pages: Ints
    host_pages: Ints


@dataclass(frozen=True, slots=True, eq=False)
class StateCheckpoint:
    """Pages with the recurrent state of the request in row `row`, after `num_tokens` of the row's
    tokens."""

    row: int
    num_tokens: int
    pages: Ints


class ScheduleBatch(msgspec.Struct, frozen=True, eq=False):
    """The scheduler's decision for one step: plain integers in columns, one entry per row.

    Row i computes the token indices [starts[i], ends[i]) of the request in slots[i]. The KV before
    starts[i] is valid. If samples[i] is False, the row is a chunk that is not the last of its
    prompt: its logits are only checked for NaN or Inf, and no token is sampled. In EXTEND and MIXED
    batches, prompt rows come first and decode rows last. A batch without rows only has copies. A
    batch and its arrays are immutable after creation.

    In VERIFY batches, all tokens of a row except the first are drafts. The slot table stores them
    after the row's known tokens. A token is sampled after each of them. Rows with more drafts come
    first.

    `early`: the most tokens by which row i may begin earlier, with everything that it computes. The
    exact number is the number of rejected drafts of the previous step, which only the device knows
    at launch. None: no row may begin earlier.

    A row that starts at token 0 begins with an empty recurrent state. Any other row continues from
    the state in its request's own pages, unless `resumed` lists the row (after 0 of its tokens).
    Each row writes its state to its request's own pages. `kept`: intermediate or final states to be
    written to other pages as well, at most one per row.

    `layers`: the layers of a SPLIT batch, whose forward takes several steps. All these steps have
    the same rows, but a step that drops the forward has rows without tokens. Only the last step has
    a result, which is the result of the forward. None: all layers.
    """

    step: int
    mode: ForwardMode
    slots: Ints
    starts: Ints
    ends: Ints
    samples: NDArray[np.bool_]
    swap_out: PageCopies | None = None  # before the forward: pool -> host
    swap_in: PageCopies | None = None  # before the forward, after swap_out: host -> pool
    resumed: tuple[StateCheckpoint, ...] = ()
    kept: tuple[StateCheckpoint, ...] = ()
    early: Ints | None = None
    layers: LayerGroup | None = None

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    @property
    def work(self) -> float:
        """Tokens of the step, times the share of the layers that the step computes."""
        return self.num_tokens if self.layers is None else self.num_tokens * self.layers.share

    def before_last(self) -> tuple[NDArray[np.intp], Ints]:
        """Return the row and the token index of all tokens except each row's last, row by row."""
        counts = self.ends - self.starts - 1
        rows = np.arange(len(counts)).repeat(counts)
        firsts = np.add.accumulate(counts, dtype=np.int32) - counts
        indices = (self.starts - firsts).repeat(counts)
        indices += np.arange(len(rows), dtype=np.int32)
        return rows, indices


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobRequest:
    """Logprobs of the tokens of some rows. Entry i belongs to row rows[i]. Entries of a row are
    adjacent."""

    rows: Ints  # [n], indices of the batch's rows
    chosen: NDArray[np.float32]  # [n]
    top_tokens: Ints  # [n, k], the most likely tokens at each position, in descending order
    top: NDArray[np.float32]  # [n, k]
    hidden: NDArray[np.float32] | None = None  # [n, hidden size], if a row requests them
    # [n, layers, experts per token], if a row requests them
    experts: NDArray[np.int16] | None = None

    def of(self, row: int, num_top: int, sampling: SamplingParams) -> Logprobs:
        """Return the logprobs of one row, with the hidden states and routed experts that `sampling`
        requests.

        Args:
            num_top: limit of the most likely tokens per position.
        """
        mine = self.rows == row
        hidden = self.hidden if sampling.hidden_states else None
        experts = self.experts if sampling.routed_experts else None
        top_tokens, top = self.top_tokens[mine, :num_top], self.top[mine, :num_top]
        return Logprobs(
            self.chosen[mine].tobytes(),
            top_tokens.shape[1],
            top_tokens.tobytes(),
            top.tobytes(),
            b"" if hidden is None else hidden[mine].tobytes(),
            b"" if experts is None else experts[mine].tobytes(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedRuns:
    """Accepted tokens of a VERIFY step: the first counts[i] of tokens[i] for row i, at least
    one."""

    tokens: Ints  # [rows, most tokens of a row]
    counts: Ints  # [rows]


class BatchResult(msgspec.Struct, frozen=True, eq=False):
    """The result of one step, in host memory.

    tokens: [num_rows]. -1 if the row sampled no token. -2 if its logits contain NaN or Inf, even if
    it samples no token. Then none of the row's KV is valid.
    runs: set for VERIFY steps only. `tokens` then has the last token of each run.
    logprobs: of the sampled tokens of rows that request them.
    prompt_logprobs: of the prompt tokens that follow the computed ones.
    pooled: by row, this step's part of the pooled vectors.
    """

    tokens: Ints
    logprobs: RowLogprobRequest | None = None
    prompt_logprobs: RowLogprobRequest | None = None
    pooled: Mapping[int, NDArray[np.float32]] = msgspec.field(default_factory=dict)
    runs: AcceptedRuns | None = None


# Placeholder of a draft that only the device knows at launch, see engine/models/drafting.
TO_GUESS = int(np.iinfo(np.int32).min)
NOT_SAMPLED = -1
NOT_FINITE = -2


class LaunchedBatch(Protocol):
    """A launched forward, which the device executes."""

    @property
    def batch(self) -> ScheduleBatch: ...

    def sample(self) -> None:
        """Choose the tokens of a step whose rows had to wait for the previous step.

        Call it once the previous step is finished. It does nothing for any other step.
        """
        ...

    def result(self) -> BatchResult:
        """Wait for the copy-done event of this step. The engine thread waits for the device only
        here.

        Raises:
            Exception: any error of the forward. It is fatal for the engine.
        """
        ...


class BatchRunner(Protocol):
    """Launches forwards without waiting for the device."""

    def launch(self, batch: ScheduleBatch) -> LaunchedBatch: ...

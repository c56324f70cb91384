"""What crosses between the scheduler and the runner: one decision, one launch, one result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.requests.logprobs import Logprobs

Ints = NDArray[np.int32]


class ForwardMode(IntEnum):
    EXTEND = 1  # prompts, or chunks of prompts
    DECODE = 2  # one token per row
    MIXED = 3  # a chunk of a prompt, and decode rows in the same forward
    VERIFY = 4  # decode rows, the first of which have drafts behind their newest token


@dataclass(frozen=True, slots=True, eq=False)
class PageCopies:
    """Whole pages between the pool and host memory, in order: device[i] <-> host[i]."""

    device_pages: Ints
    host_pages: Ints


@dataclass(frozen=True, slots=True, eq=False)
class StateAt:
    """Pages with the state of the request in a batch's row, after so many of the row's tokens."""

    row: int
    num_tokens: int
    pages: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleBatch:
    """The scheduler's decision for one step. Plain integers in columns, one entry per row.

    Row i computes token indices [starts[i], ends[i]) of the request in slots[i]; its KV before
    starts[i] is valid. A row with samples[i] False is a chunk that is not its prompt's last: what
    is computed after it tells whether it is finite, and is no token.
    In EXTEND and MIXED batches extend rows come first, decode rows last. One without rows is there
    for its copies alone.
    Nobody changes a batch, or an array of one, after it is made.

    In VERIFY batches a row's tokens but the first are drafts, which the request table has behind
    its known tokens; each is sampled after. Rows with more drafts come first. `early`: row i may
    begin earlier, by early[i] tokens at most and with all that it computes: by as many as are
    rejected of the drafts of the step before, which only the device knows yet. None: no row may.

    A row that starts at token 0 begins with an empty state; any other goes on from the one in its
    request's own pages, unless it is among `resumed` (after 0 of its tokens). Each leaves its state
    in those own pages. `kept`: states on the way, or at the end, that are wanted in other pages
    too; one of a row at most.
    """

    step: int
    mode: ForwardMode
    slots: Ints
    starts: Ints
    ends: Ints
    samples: NDArray[np.bool_]
    swap_out: PageCopies | None = None  # before the forward: pool -> host
    swap_in: PageCopies | None = None  # before the forward, after swap_out: host -> pool
    resumed: tuple[StateAt, ...] = ()
    kept: tuple[StateAt, ...] = ()
    early: Ints | None = None

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    def before_last(self) -> tuple[NDArray[np.intp], Ints]:
        """All tokens but each row's last, row after row: the row and the index of each."""
        counts = self.ends - self.starts - 1
        rows = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        indices = np.arange(len(rows), dtype=np.int32) - (firsts - self.starts)[rows]
        return rows, indices.astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Of tokens that some rows have: entry i is of row rows[i], whose entries follow each other."""

    rows: Ints  # [n], places among the batch's rows
    chosen: NDArray[np.float32]  # [n]
    top_tokens: Ints  # [n, k], of each place the likeliest, in falling order
    top: NDArray[np.float32]  # [n, k]

    def of(self, row: int, num_top: int) -> Logprobs:
        """What one row has, at most `num_top` of the likeliest tokens of each place."""
        mine = self.rows == row
        top_tokens, top = self.top_tokens[mine, :num_top], self.top[mine, :num_top]
        return Logprobs(
            self.chosen[mine].tobytes(),
            top_tokens.shape[1],
            top_tokens.tobytes(),
            top.tobytes(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What the rows of a VERIFY step gave: row i the first counts[i] of tokens[i], at least one."""

    tokens: Ints  # [rows, most tokens of a row]
    counts: Ints  # [rows]


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """What one step gave, on the host. tokens[i] belongs to row i; -1 where the row sampled
    nothing; -2 where its logits were not finite, whether it samples or not: then nothing of its KV
    is to be trusted.

    runs: of a VERIFY step, and only of one; tokens has the last of each.

    logprobs: of the tokens, for the rows that ask for them; prompt_logprobs: of the prompt's tokens
    that follow those which the step has computed. pooled: by row, what the step adds to the vectors
    of those that want no token.
    """

    tokens: Ints
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    pooled: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    runs: Runs | None = None


# Of a draft that only the device will know, see engine/models/drafting.
TO_GUESS = int(np.iinfo(np.int32).min)
NOT_SAMPLED = -1
NOT_FINITE = -2


class Launched(Protocol):
    """A forward that the device is working on."""

    @property
    def batch(self) -> ScheduleBatch: ...

    def sample(self) -> None:
        """Once the step before is finished: chooses the tokens of a step whose rows had to wait for
        that. Of any other step nothing is left to do."""
        ...

    def result(self) -> BatchResult:
        """Waits for the copy-done event of this step: the only wait of the engine thread.

        Raises:
            Exception: whatever the forward raised; it is the node's own fault, and fatal.
        """
        ...


class Runner(Protocol):
    """Launches forwards; never waits for the device."""

    def launch(self, batch: ScheduleBatch) -> Launched: ...

"""The arguments that all kinds of paged attention take: the rows of a step, the properties of a
layer that its plan depends on, and the scores of a layer."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """The rows of a step, which are consecutive ranges of queries.

    Row i's queries are the last `query_starts[i + 1] - query_starts[i]` of its lengths[i] tokens.
    A row of length 0 is padding: its one query sees no key and its output is 0.

    Attributes:
        page_ids: int32 [any]; page_ids[page_starts[i] + j] holds row i's tokens from j * page_size
            on. Entries past a row's last page are never followed. With a window, neither are
            entries of pages whose keys the row's queries do not see.
        page_starts: int32 [num_rows].
        query_starts: int32 [num_rows + 1], ascending from 0.
        lengths: int32 [num_rows], each at least the row's number of queries, or 0.
        num_tokens: query_starts[-1], known on the host.
        num_decodes: number of last rows with one query each. All rows of a decode step.
    """

    page_ids: Tensor
    page_starts: Tensor
    query_starts: Tensor
    lengths: Tensor
    num_tokens: int
    num_decodes: int

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_extends(self) -> int:
        """Number of rows before the decode rows."""
        return self.lengths.shape[0] - self.num_decodes

    @property
    def num_queries(self) -> int:
        """Number of queries of the rows before the decode rows."""
        return self.num_tokens - self.num_decodes

    def extends(self) -> "AttentionRows":
        """Return the rows before the decode rows."""
        past = self.num_extends
        return AttentionRows(
            self.page_ids,
            self.page_starts[:past],
            self.query_starts[: past + 1],
            self.lengths[:past],
            self.num_queries,
            num_decodes=0,
        )

    def decodes(self) -> "AttentionRows":
        """Return the decode rows, as a step of their own."""
        first = self.num_extends
        return AttentionRows(
            self.page_ids,
            self.page_starts[first:],
            self.query_starts[first:] - self.num_queries,
            self.lengths[first:],
            self.num_decodes,
            self.num_decodes,
        )

    def check(self) -> None:
        """Raise ValueError for wrong shapes."""
        num_rows = self.num_rows
        if self.page_starts.shape != (num_rows,) or self.page_ids.ndim != 1:
            raise ValueError(
                f"page_starts: [{num_rows}] and page_ids: [any],"
                f" got {tuple(self.page_starts.shape)} and {tuple(self.page_ids.shape)}"
            )
        if self.query_starts.shape != (num_rows + 1,):
            raise ValueError(
                f"query_starts: [{num_rows + 1}], got {tuple(self.query_starts.shape)}"
            )
        if not 0 <= self.num_decodes <= num_rows or self.num_tokens < self.num_decodes:
            raise ValueError(
                f"{self.num_decodes} decodes in {num_rows} rows of {self.num_tokens} tokens"
            )


class AttentionKind(NamedTuple):
    """The properties of a layer that its plan depends on.

    Attributes:
        heads: of queries.
        window: each query sees only the last `window` keys up to its own token. None: all.
        value_dim: of latents: the first numbers of a key that are its value, shared by all heads.
            None: keys and values are stored separately.
    """

    heads: int
    window: int | None = None
    value_dim: int | None = None


class Scoring(NamedTuple):
    """How a layer makes scores of the products of queries and keys.

    Attributes:
        scale: multiplies the products. Above 0.
        soft_cap: above 0; a score s becomes soft_cap * tanh(s / soft_cap).
        sinks: contiguous [heads] of any float dtype: the score of one more key that every query of
            the head sees, whose value is zero.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None

"""The arguments of all paged attention: the rows of a step, the layer properties that a plan
depends on, and how scores are computed."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """The rows (requests) of a step, whose queries are consecutive.

    Row i has query_starts[i + 1] - query_starts[i] queries, for the last of its lengths[i] tokens.
    A row of length 0 is padding: its one query sees no key and its output is 0.

    Attributes:
        page_ids: int32 [any]. page_ids[page_starts[i] + j] holds row i's tokens from j * page_size
            on. Not read after a row's last page and, with a window, for pages whose keys no query
            of the row sees.
        page_starts: int32 [num_rows].
        query_starts: int32 [num_rows + 1], ascending from 0.
        lengths: int32 [num_rows], each at least the row's number of queries, or 0.
        num_tokens: query_starts[-1], known on the host.
        num_decodes: number of rows at the end with one query each. All rows of a decode step.
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
        """Raise ValueError if shapes are wrong."""
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
    """The layer properties that a plan depends on.

    Attributes:
        heads: query heads.
        window: each query sees only the last `window` keys up to its own token. None: all.
        value_dim: for latents (MLA): a value is the first value_dim numbers of its key, shared by
            all heads. None: keys and values are stored separately.
    """

    heads: int
    window: int | None = None
    value_dim: int | None = None


class Scoring(NamedTuple):
    """The scores that a layer computes from the products of queries and keys.

    Attributes:
        scale: factor of the products, above 0.
        soft_cap: above 0. A score s becomes soft_cap * tanh(s / soft_cap).
        sinks: contiguous [heads] of any float dtype: score of one more key with value 0, which
            every query of the head sees.
    """

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None

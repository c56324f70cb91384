"""The shapes of steps for which CUDA graphs are captured, and the padding of steps to these shapes.

A step fits a shape if the two differ in padding only. The shape of a decode step has one token per
row. All other shapes are *ragged*: rows of any length, for prompts and for steps that verify
drafts. The padding rows of ragged shapes share the surplus tokens.
"""

from typing import NamedTuple

import numpy as np

from engine.batch.batch import Ints
from engine.batch.forward import HostBatch
from kernels.linear_attention.state_cells import FEW

# Minimum tokens of ragged shapes. Above about 200 tokens, a forward of a large model takes a GPU
# longer than the host needs to launch it.
SHORT_TOKENS = 256
# Average tokens of a row in ragged shapes. Attention chooses its tiles by this average.
_DRAFT_WIDTHS = (4, 1)  # rows with several drafts, rows with few drafts
_WIDTHS = (32, *_DRAFT_WIDTHS)  # prompts, then the rows with drafts
_FINE, _COARSE = 8, 2  # maximum padding: an eighth of the step, or a half


class GraphShape(NamedTuple):
    """The shape of a padded step. All steps of one shape launch the same kernels.

    Attributes:
        tokens, rows: numbers of the step, including padding.
        late: whether the step has drafts, if the model has a drafter on the device or recurrent
            states. Work before or after the layers is then captured, too.
        adapted: whether tokens may have adapters.
    """

    tokens: int
    rows: int
    late: bool = False
    adapted: bool = False

    @property
    def is_ragged(self) -> bool:
        return self.rows < self.tokens

    @property
    def chooses(self) -> bool:
        """Return whether a graph of the choice of tokens is captured with this shape."""
        return not self.is_ragged and not self.adapted

    @property
    def num_decodes(self) -> int:
        """Number of rows at the end that have one token each, see ForwardBatch."""
        return 0 if self.is_ragged else self.rows

    def fits(self, batch: HostBatch) -> bool:
        """Return whether a step without images can be padded to this shape.

        A ragged step needs a padding row with at least one token. Recurrent layers compute long
        rows in another way than short ones, and padding must not change that.
        """
        num_tokens, num_rows = len(batch.token_ids), batch.num_rows
        if not self.is_ragged:
            return batch.is_decode and num_rows <= self.rows
        if not (num_tokens < self.tokens and num_rows < self.rows):
            return False
        if batch.state_reads.shape[1]:  # see StateRows.has_long_rows
            num_extends = num_rows - batch.num_decodes
            has_long_rows = num_tokens - batch.num_decodes > FEW * num_extends
            if has_long_rows != (self.tokens > FEW * self.rows):
                return False
        return len(batch.sampled) <= self.tokens

    def padded_starts(self, query_starts: Ints) -> Ints:
        """Return `query_starts` of a step padded to this shape."""
        ends = self.padding_ends(len(query_starts) - 1, int(query_starts[-1]))
        return np.concatenate((query_starts, ends))

    def padding_ends(self, num_rows: int, num_tokens: int) -> Ints:
        """Return where the padding rows of a step end.

        The surplus tokens are divided among the first padding rows, so that no row is long. Other
        padding rows have no tokens.
        """
        added = self.rows - num_rows
        each = -(-(self.tokens - num_tokens) // added) if added else 0
        ends: Ints = np.arange(1, added + 1, dtype=np.int32)
        ends *= np.int32(each)
        ends += np.int32(num_tokens)
        return np.minimum(ends, self.tokens, out=ends)


def graph_shapes(max_rows: int, *, late: bool, adapted: bool) -> tuple[GraphShape, ...]:
    """Return the shapes to capture, in ascending order of tokens and then of rows.

    Args:
        max_rows: maximum rows of a decode step. A step that verifies drafts has at most as many
            tokens.
        late: whether steps with drafts have shapes of their own.
        adapted: whether requests may have adapters.
    """
    shapes = [GraphShape(rows, rows) for rows in ladder(max_rows, _FINE)]
    if adapted:
        shapes += [GraphShape(rows, rows, adapted=True) for rows in ladder(max_rows, _COARSE)]
    for is_adapted in (False, True) if adapted else (False,):
        shapes += [GraphShape(*each, False, is_adapted) for each in _ragged(max_rows, _WIDTHS)]
        if late:
            ragged = _ragged(max_rows, _DRAFT_WIDTHS)
            shapes += [GraphShape(*each, True, is_adapted) for each in ragged]
    return tuple(sorted(shapes))


def _ragged(max_rows: int, widths: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return (tokens, rows) of ragged shapes. Each includes at least one token and one row of
    padding."""
    return {
        (tokens, min(-(-(tokens - 1) // width) + 1, tokens - 1))
        for tokens in ladder(max_tokens(max_rows), _COARSE)
        if tokens > 2
        for width in widths
    }


def max_tokens(max_rows: int) -> int:
    """Return the tokens of the largest shape, including one token of padding. It is a shape for
    drafts or short prompts."""
    return max(max_rows + 1, SHORT_TOKENS)


def ladder(largest: int, parts: int) -> tuple[int, ...]:
    """Return ascending sizes up to `largest`. Padding a step of size n to the next size adds at
    most n / parts. Steps smaller than `parts` are padded to powers of two."""
    sizes = [size for size in (1, 2, 4) if size < parts]
    size = step = parts
    while size < largest:
        sizes.append(size)
        size += step
        if size % (parts * step) == 0:
            step = size // parts
    return (*(size for size in sizes if size < largest), largest)

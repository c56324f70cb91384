"""Dummy batches for warmup: compilation, graph capture and measurement before traffic.

They write no page. The content of pages that they read is arbitrary, and so are their results.
"""

from typing import Any

import numpy as np

from engine.batch.batch import ForwardMode, Ints, ScheduleBatch
from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import GraphShape


def padding(
    shape: GraphShape, num_tables: int, num_pages: int = 0, state_pages: int = 0
) -> HostBatch:
    """Return a step of one shape that has only padding rows, with space for `num_pages` page
    ids."""
    num_tokens, num_rows = shape.tokens, shape.rows
    starts: Ints = np.arange(num_rows + 1, dtype=np.int32)
    sampled = np.arange(num_rows)
    if shape.is_ragged:
        starts, sampled = shape.padded_starts(np.zeros(1, np.int32)), np.zeros(num_tokens, np.int64)
    return _over_dummies(
        num_tables,
        num_pages,
        state_pages,
        positions=np.zeros(num_tokens, dtype=np.int32),
        lengths=np.zeros(num_rows, dtype=np.int32),
        query_starts=starts,
        sampled=sampled,
        num_decodes=shape.num_decodes,
        extends=(),
    )


def mixed_rehearsal(
    num_tokens: int, num_rows: int, num_tables: int, page_size: int, state_pages: int = 0
) -> HostBatch:
    """Return a step with one prompt and decode rows of padding.

    The prompt attends to itself like a real one, with page 0 as all of its pages. `num_tokens`
    counts all tokens of the step.
    """
    num_decodes = num_rows - 1
    num_prompt = num_tokens - num_decodes
    starts = np.arange(num_prompt, num_tokens + 1, dtype=np.int32)
    lengths = np.zeros(num_rows, dtype=np.int32)
    lengths[0] = num_prompt
    return _over_dummies(
        num_tables,
        -(-num_prompt // page_size),
        state_pages,
        positions=np.arange(num_tokens, dtype=np.int32),
        lengths=lengths,
        query_starts=np.concatenate((np.zeros(1, dtype=np.int32), starts)),
        sampled=np.arange(num_prompt - 1, num_tokens),
        num_decodes=num_decodes,
        extends=((num_prompt, num_prompt),),
    )


def verify_rehearsal(
    num_rows: int, num_tables: int, page_size: int, state_pages: int = 0
) -> tuple[HostBatch, ScheduleBatch]:
    """Return rows with one draft each after a step with drafts, as a forward and as its schedule.
    They start at the given positions, independent of rejected drafts."""
    num_tokens, rows = 2 * num_rows, np.arange(num_rows, dtype=np.int32)
    firsts = np.arange(0, num_tokens, 2)
    forward = _over_dummies(
        num_tables,
        -(-2 // page_size),
        state_pages,
        positions=np.arange(num_tokens, dtype=np.int32) % 2,
        lengths=np.full(num_rows, 2, dtype=np.int32),
        query_starts=np.arange(0, num_tokens + 1, 2, dtype=np.int32),
        sampled=np.concatenate((firsts + 1, firsts)),
        num_decodes=0,
        extends=((2, 2),) * num_rows,
    )
    batch = ScheduleBatch(
        step=0,
        mode=ForwardMode.VERIFY,
        slots=rows,
        starts=np.ones(num_rows, np.int32),
        ends=np.full(num_rows, 3, np.int32),
        samples=np.ones(num_rows, np.bool_),
        early=np.zeros(num_rows, np.int32),
    )
    return forward, batch


def _over_dummies(num_tables: int, num_pages: int, state_pages: int, **columns: Any) -> HostBatch:
    """Return a step over dummy tokens. It writes no page, reads its recurrent states as zeros, and
    does not write them."""
    num_tokens, num_rows = len(columns["positions"]), len(columns["lengths"])
    nowhere = np.full((num_rows, state_pages), -1, dtype=np.int32)
    return HostBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        locations=tuple(np.full(num_tokens, -1) for _ in range(num_tables)),
        page_starts=tuple(np.zeros(num_rows, dtype=np.int32) for _ in range(num_tables)),
        state_reads=nowhere,
        state_writes=nowhere,
        state_marks=np.zeros(num_rows, dtype=np.int32),
        state_kept=nowhere,
        page_ids=np.zeros(num_pages, dtype=np.int32),
        slots=np.arange(num_rows),
        seen=(),
        **columns,
    )

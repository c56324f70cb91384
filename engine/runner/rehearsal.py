"""Batches of nobody's tokens: to compile, to capture and to measure before there is traffic.

They write no page. What they read of the pool may be anything, and so are their results.
"""

import numpy as np
import torch

from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import ForwardBatch


def decode_rehearsal(
    num_rows: int, num_tables: int, num_pages: int = 0, state_pages: int = 0
) -> ForwardBatch:
    """A decode step of padding rows, with room for so many page ids."""
    places = torch.arange(num_rows + 1)
    return ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int32),
        positions=torch.zeros(num_rows, dtype=torch.int32),
        locations=tuple(torch.full((num_rows,), -1) for _ in range(num_tables)),
        lengths=torch.zeros(num_rows, dtype=torch.int32),
        page_starts=tuple(torch.zeros(num_rows, dtype=torch.int32) for _ in range(num_tables)),
        query_starts=places.int(),
        sampled=places[:-1],
        **_no_states(num_rows, state_pages),
        page_ids=torch.zeros(num_pages, dtype=torch.int32),
        slots=places[:-1],
        num_decodes=num_rows,
        seen=(),
    )


def mixed_rehearsal(
    num_tokens: int, num_rows: int, num_tables: int, page_size: int, state_pages: int = 0
) -> ForwardBatch:
    """One prompt that attends to itself as a real one would, on page 0 over and over, and behind it
    decode rows of padding. `num_tokens` is of all of them together."""
    num_decodes = num_rows - 1
    num_prompt = num_tokens - num_decodes
    starts = torch.arange(num_prompt, num_tokens + 1, dtype=torch.int32)
    lengths = torch.zeros(num_rows, dtype=torch.int32)
    lengths[0] = num_prompt
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32),
        locations=tuple(torch.full((num_tokens,), -1) for _ in range(num_tables)),
        lengths=lengths,
        page_starts=tuple(torch.zeros(num_rows, dtype=torch.int32) for _ in range(num_tables)),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int32), starts)),
        sampled=torch.arange(num_prompt - 1, num_tokens),
        **_no_states(num_rows, state_pages),
        page_ids=torch.zeros(-(-num_prompt // page_size), dtype=torch.int32),
        slots=torch.arange(num_rows),
        num_decodes=num_decodes,
        seen=(),
    )


def verify_rehearsal(
    num_rows: int, num_tables: int, page_size: int, state_pages: int = 0
) -> tuple[ForwardBatch, ScheduleBatch]:
    """Rows with a draft each, behind a step with drafts, as a forward and as its scheduler tells
    it: whatever was rejected there, they begin where they say."""
    num_tokens, rows = 2 * num_rows, torch.arange(num_rows, dtype=torch.int32)
    firsts = torch.arange(0, num_tokens, 2)
    forward = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32) % 2,
        locations=tuple(torch.full((num_tokens,), -1) for _ in range(num_tables)),
        lengths=torch.full((num_rows,), 2, dtype=torch.int32),
        page_starts=tuple(rows * 0 for _ in range(num_tables)),
        query_starts=torch.arange(0, num_tokens + 1, 2, dtype=torch.int32),
        sampled=torch.cat((firsts + 1, firsts)),
        **_no_states(num_rows, state_pages),
        page_ids=torch.zeros(-(-2 // page_size), dtype=torch.int32),
        slots=rows.long(),
        num_decodes=0,
        seen=(),
    )
    told = ScheduleBatch(
        step=0,
        mode=ForwardMode.VERIFY,
        slots=np.arange(num_rows, dtype=np.int32),
        starts=np.ones(num_rows, np.int32),
        ends=np.full(num_rows, 3, np.int32),
        samples=np.ones(num_rows, np.bool_),
        early=np.zeros(num_rows, np.int32),
    )
    return forward, told


def _no_states(num_rows: int, state_pages: int) -> dict[str, torch.Tensor]:
    """From zeros, and to nowhere."""
    nowhere = torch.full((num_rows, state_pages), -1, dtype=torch.int32)
    marks = torch.zeros(num_rows, dtype=torch.int32)
    return {
        "state_reads": nowhere,
        "state_writes": nowhere,
        "state_marks": marks,
        "state_kept": nowhere,
    }

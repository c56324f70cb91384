"""Batches of nobody's tokens: to compile, to capture and to measure before there is traffic.

They write no page. What they read of the pool may be anything, and so are their results.
"""

import torch

from common.engine.rows.forward import ForwardBatch
from kernels.sampling import SamplingColumns


def decode_rehearsal(num_rows: int, num_pages: int = 0) -> ForwardBatch:
    """A decode step of padding rows, with room for so many page ids, every row sampled."""
    places = torch.arange(num_rows + 1)
    return ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int32),
        positions=torch.zeros(num_rows, dtype=torch.int32),
        locations=torch.full((num_rows,), -1),
        lengths=torch.zeros(num_rows, dtype=torch.int32),
        page_starts=torch.zeros(num_rows, dtype=torch.int32),
        query_starts=places.int(),
        sampled=places[:-1],
        page_ids=torch.zeros(num_pages, dtype=torch.int32),
        slots=places[:-1],
        sampling=_sampling(num_rows),
        num_decodes=num_rows,
    )


def mixed_rehearsal(num_tokens: int, num_rows: int, page_size: int) -> ForwardBatch:
    """One prompt that attends to itself as a real one would, on page 0 over and over, and behind it
    decode rows of padding. All rows are sampled; `num_tokens` is of all of them together."""
    num_decodes = num_rows - 1
    num_prompt = num_tokens - num_decodes
    starts = torch.arange(num_prompt, num_tokens + 1, dtype=torch.int32)
    lengths = torch.zeros(num_rows, dtype=torch.int32)
    lengths[0] = num_prompt
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32),
        locations=torch.full((num_tokens,), -1),
        lengths=lengths,
        page_starts=torch.zeros(num_rows, dtype=torch.int32),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int32), starts)),
        sampled=torch.arange(num_prompt - 1, num_tokens),
        page_ids=torch.zeros(-(-num_prompt // page_size), dtype=torch.int32),
        slots=torch.arange(num_rows),
        sampling=_sampling(num_rows),
        num_decodes=num_decodes,
    )


def _sampling(num_rows: int) -> SamplingColumns:
    """Every filter at work."""
    return SamplingColumns(
        temperature=torch.ones(num_rows),
        top_k=torch.full((num_rows,), 40, dtype=torch.int32),
        top_p=torch.full((num_rows,), 0.9),
        min_p=torch.full((num_rows,), 0.01),
        seeds=torch.zeros(num_rows, 2, dtype=torch.int32),
        positions=torch.zeros(num_rows, dtype=torch.int32),
    )

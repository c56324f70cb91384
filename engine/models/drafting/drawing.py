"""Drafts drawn one after the other: each is an input of the next one."""

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DraftView
from engine.models.drafting.protocol import Draw


def drawn(
    batch: ForwardBatch,
    num_rows: Sequence[int],
    draw: Draw,
    logits_of: Callable[[ForwardBatch], Tensor],
) -> Tensor:
    """Return the token ids of a step with drafts, see DeviceDrafter.guess.

    Args:
        logits_of: stores the KV of a step with one token of each row, and returns the logits of the
            next tokens.
    """
    firsts, starts = batch.query_starts[:-1].long(), batch.starts
    token_ids = batch.token_ids.clone()
    for number, rows in enumerate(num_rows):
        places = firsts[:rows] + number
        logits = logits_of(one_token(batch, token_ids, places, starts[:rows] + number + 1))
        drafts = token_ids[places + 1]
        fresh = draw(logits, number).clamp_(min=0)
        token_ids[places + 1] = torch.where(drafts == TO_GUESS, fresh, drafts)
    return token_ids


def view_of(pool: KVPool) -> DraftView:
    """Return the drafter's part of a pool that has one."""
    assert pool.draft is not None
    return pool.draft


def one_token(
    batch: ForwardBatch, token_ids: Tensor, places: Tensor, lengths: Tensor
) -> ForwardBatch:
    """Return a decode step of the batch's first rows, each with the token at one of its places.

    Args:
        lengths: int32, tokens of each row up to that one.
    """
    num_rows = len(places)
    starts = torch.arange(num_rows + 1, device=places.device)
    return replace(
        batch,
        locations=tuple(each[places] for each in batch.locations),
        page_starts=tuple(each[:num_rows] for each in batch.page_starts),
        token_ids=token_ids[places],
        positions=batch.positions[..., places],
        lengths=lengths,
        query_starts=starts.int(),
        sampled=starts[:-1],
        state_reads=batch.state_reads[:num_rows],
        state_writes=batch.state_writes[:num_rows],
        state_marks=batch.state_marks[:num_rows],
        state_kept=batch.state_kept[:num_rows],
        slots=batch.slots[:num_rows],
        num_decodes=num_rows,
        seen=(),
    )

"""Drawing of drafts one by one: each draft is an input of the next one."""

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DraftView
from engine.models.drafting.protocol import DeviceDrafter, DraftSteps, Draw


class EagerDrafts:
    """Forwards of a drafter that are launched kernel by kernel, see DraftSteps.

    Args:
        batch: the step of the model, on the device.
    """

    def __init__(
        self, drafter: DeviceDrafter, batch: ForwardBatch, future_tokens: Tensor, pool: KVPool
    ) -> None:
        self.token_ids = batch.token_ids.clone()
        self._drafter = drafter
        self._batch = batch
        self._kept = future_tokens, pool
        self._starts = batch.starts
        self._vectors = drafter.before(batch, pool)

    def vectors(self, number: int, num_rows: int) -> Tensor:
        batch = self._batch
        places = batch.query_starts[:num_rows].long() + number
        one = one_token(batch, self.token_ids, places, self._starts[:num_rows] + number + 1)
        self._vectors = self._drafter.advance(one, self._vectors[:num_rows], *self._kept)
        return self._vectors


def drawn(
    steps: DraftSteps,
    batch: ForwardBatch,
    num_rows: Sequence[int],
    draw: Draw,
    logits: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the token ids of a step with drafts, with a drawn token in place of each TO_GUESS.

    Args:
        num_rows: number of rows with at least one draft, with at least two, and so on. Rows with
            more drafts come first.
        logits: returns the logits of vectors.
    """
    token_ids, firsts = steps.token_ids, batch.query_starts[:-1].long()
    for number, rows in enumerate(num_rows):
        fresh = draw(logits(steps.vectors(number, rows)), number).clamp_(min=0)
        places = firsts[:rows] + number + 1
        drafts = token_ids[places]
        token_ids[places] = torch.where(drafts == TO_GUESS, fresh, drafts)
    return token_ids


def view_of(pool: KVPool) -> DraftView:
    """Return the drafter's part of a pool that has one."""
    assert pool.draft is not None
    return pool.draft


def has_draft(batch: ForwardBatch, number: Tensor, num_rows: Tensor) -> Tensor:
    """Return whether a draft follows token `number` of each row, bool [rows of the batch].

    Args:
        number: int64 [1].
        num_rows: int32 [1]. Further rows are padding.
    """
    rows = torch.arange(batch.num_rows, device=number.device)
    return (rows < num_rows) & (number + 1 < batch.query_starts.diff())


def sample_places(
    batch: ForwardBatch, rows: Tensor, num_rows: Tensor | int, number: Tensor | int
) -> Tensor:
    """Return where the sample after token `number` of each row is among the step's samples, int64
    [n]. Only valid for rows with a draft after that token.

    Args:
        rows: int64 [n], numbers of the rows.
        num_rows: rows of the step.
    """
    # First comes the sample after the last token of each row. So each earlier row has one less.
    return num_rows + batch.query_starts[rows] - rows + number


def live_token(batch: ForwardBatch, number: Tensor, num_rows: Tensor) -> ForwardBatch:
    """Return a decode step of all rows of a batch, each with token `number` of the row. Rows
    without a draft after this token are padding. For the arguments, see `has_draft`."""
    live = has_draft(batch, number, num_rows)
    places = (batch.query_starts[:-1].long() + number).clamp(max=len(batch.token_ids) - 1)
    lengths = torch.where(live, batch.starts + number.int() + 1, 0)
    one = one_token(batch, batch.token_ids, places, lengths)
    return replace(
        one,
        token_ids=torch.where(live, one.token_ids, 0),
        locations=tuple(torch.where(live, each, -1) for each in one.locations),
    )


def one_token(
    batch: ForwardBatch, token_ids: Tensor, places: Tensor, lengths: Tensor
) -> ForwardBatch:
    """Return a decode step of the batch's first rows, with one token each.

    Args:
        places: places of these tokens in the batch.
        lengths: int32, number of tokens of each row up to this one.
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
        extends=(),
    )

"""A draft layer that runs over a model's pages.

The KV of a token is made of the token and of the model's hidden state of the token before it. It
depends on no later token, so it is stored in the token's page and moves with that page. The hidden
state that the next step needs is stored there too: each page holds that of its newest token. A node
that continues after a token, on this node or another one, has that page.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DraftView
from engine.models.blocks.protocol import KeptStates, ModelStep
from engine.models.drafting.protocol import DraftLayer
from kernels.pages.store_kv import store_kv

# Draws int32 [n] draft tokens from logits [n, any] of the first n rows, given the number of the
# draft. A draft is negative where logits are not finite.
Draw: TypeAlias = Callable[[Tensor, int], Tensor]

_TABLE = 0  # the page table that it uses


class DraftHead:
    """A draft layer behind a model. Forward stream only. Never waits for the device.

    Args:
        embed: token ids of a batch and the future map's tokens -> embeddings, as in the model.
        logits: of the model.
    """

    def __init__(
        self,
        layer: DraftLayer,
        embed: Callable[[Tensor, Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.layer = layer
        # Hidden states of the last step of each pool: engines of one process may share a model.
        self._newest: WeakKeyDictionary[KVPool, Tensor] = WeakKeyDictionary()
        self._embed = embed
        self._logits = logits

    def follow(
        self,
        step: ModelStep,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        future_tokens: Tensor,
        pool: KVPool,
    ) -> None:
        """Store the draft layer's KV of a step's tokens. Called after the model's forward.

        Args:
            hidden, tapped: as in DraftLayer.
        """
        batch, view = step.batch, _view(pool)
        own = self.layer.vectors(hidden, tapped, step)
        vectors = own.roll(1, 0)
        vectors[batch.query_starts[:-1]] = _vectors_before(batch, view, pool.layout.page_size)
        embeddings = self._embed(batch.token_ids, future_tokens)
        self.layer.keep(vectors, embeddings, step, KeptStates(view.tokens, _TABLE, {}))
        _store(own, _newest_of_pages(batch, pool.layout.page_size), view)
        self._newest[pool] = own

    def continue_from(self, batch: ForwardBatch, places: Tensor, pool: KVPool) -> None:
        """Store the hidden states from which the rows continue. Called after `follow` of a step
        with drafts and its verification.

        Args:
            places: int64 [num_rows], places of the rows' last accepted tokens in the step.
        """
        pages = batch.locations[_TABLE][places] // pool.layout.page_size
        _store(self._newest[pool][places], pages, _view(pool))

    def guess(
        self,
        batch: ForwardBatch,
        num_rows: Sequence[int],
        future_tokens: Tensor,
        pool: KVPool,
        draw: Draw,
    ) -> Tensor:
        """Return the token ids of a step with drafts, with a drawn token in place of each TO_GUESS.
        Called before the step.

        Args:
            num_rows: number of rows with at least one draft, at least two, and so on. Rows with
                more drafts come first.
        """
        view, firsts = _view(pool), batch.query_starts[:-1].long()
        kept, token_ids = KeptStates(view.tokens, _TABLE, {}), batch.token_ids.clone()
        vectors = _vectors_before(batch, view, pool.layout.page_size)
        for number, rows in enumerate(num_rows):
            places = firsts[:rows] + number
            one = _one_token(batch, token_ids, places)
            embeddings = self._embed(one.token_ids, future_tokens)
            vectors = self.layer.forward(vectors[:rows], embeddings, ModelStep(one), kept)
            drawn = draw(self.layer.logits(vectors, self._logits), number).clamp_(min=0)
            drafts = token_ids[places + 1]
            token_ids[places + 1] = torch.where(drafts == TO_GUESS, drawn, drafts)
        return token_ids


def _view(pool: KVPool) -> DraftView:
    assert pool.draft is not None
    return pool.draft


def _vectors_before(batch: ForwardBatch, view: DraftView, page_size: int) -> Tensor:
    """Return the hidden state of the token before each row's first, [num_rows, hidden]. Undefined
    for rows at position 0."""
    before = batch.positions[batch.query_starts[:-1]] - 1
    if not len(batch.page_ids):  # every row starts at position 0
        return view.vectors.new_zeros(len(before), view.vectors[0].numel())
    places = batch.page_starts[_TABLE] + before.clamp(min=0) // page_size
    return view.vectors[batch.page_ids[places].long()].flatten(1)


def _newest_of_pages(batch: ForwardBatch, page_size: int) -> Tensor:
    """Return the page of each token that is the newest one in its page after the step, and -1 for
    other tokens."""
    locations = batch.locations[_TABLE]
    newest = (locations + 1) % page_size == 0
    newest.index_fill_(0, batch.query_starts[1:].long() - 1, True)
    return torch.where(newest, locations // page_size, -1)


def _store(vectors: Tensor, pages: Tensor, view: DraftView) -> None:
    key, value = vectors.view(len(vectors), 1, 2, -1).unbind(dim=2)
    store_kv(key, value, view.vectors, pages)


def _one_token(batch: ForwardBatch, token_ids: Tensor, places: Tensor) -> ForwardBatch:
    """Return a decode step of the batch's first rows, each with the token at one of its places."""
    num_rows, positions = len(places), batch.positions[places]
    starts = torch.arange(num_rows + 1, device=places.device)
    return replace(
        batch,
        locations=tuple(each[places] for each in batch.locations),
        page_starts=tuple(each[:num_rows] for each in batch.page_starts),
        token_ids=token_ids[places],
        positions=positions,
        lengths=positions + 1,
        query_starts=starts.int(),
        sampled=starts[:-1],
        state_reads=batch.state_reads[:num_rows],
        state_writes=batch.state_writes[:num_rows],
        state_marks=batch.state_marks[:num_rows],
        state_kept=batch.state_kept[:num_rows],
        slots=batch.slots[:num_rows],
        num_decodes=num_rows,
    )

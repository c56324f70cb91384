"""A drafter's layer over a model's pages.

What it keeps of a token is made of the token and of the model's vector of the one before, so it
depends on nothing that follows: it lies in the token's page, and is found wherever the page goes.
The vector that the next step will need lies there too: of every page that of its newest token.
Whoever goes on behind a token, on this node or on another one, has its page.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DraftView
from engine.models.blocks.protocol import Kept, Step
from engine.models.drafting.protocol import DraftLayer
from kernels.pages.store_kv import store_kv

# Of logits [n, any] of the first n rows, the tokens int32 [n] for their draft of a number; negative
# ones where logits are not finite.
Draw: TypeAlias = Callable[[Tensor, int], Tensor]

_TABLE = 0  # whose pages have it


class DraftHead:
    """Forward stream only; never waits for the device.

    Args:
        embed: token ids of a batch and the future map's tokens -> embeddings, as of the model.
        logits: of the model.
    """

    def __init__(
        self,
        layer: DraftLayer,
        embed: Callable[[Tensor, Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.layer = layer
        # Vectors of the last step of each pool: engines of one process may share a model.
        self._newest: WeakKeyDictionary[KVPool, Tensor] = WeakKeyDictionary()
        self._embed = embed
        self._logits = logits

    def follow(
        self,
        step: Step,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        future_tokens: Tensor,
        pool: KVPool,
    ) -> None:
        """After the model: what there is to keep of a step's tokens.

        Args:
            hidden, tapped: as of DraftLayer.
        """
        batch, view = step.batch, _view(pool)
        own = self.layer.vectors(hidden, tapped, step)
        vectors = own.roll(1, 0)
        vectors[batch.query_starts[:-1]] = _vectors_before(batch, view, pool.layout.page_size)
        embeddings = self._embed(batch.token_ids, future_tokens)
        self.layer.keep(vectors, embeddings, step, Kept(view.tokens, _TABLE, {}))
        _store(own, _newest_of_pages(batch, pool.layout.page_size), view)
        self._newest[pool] = own

    def go_on_from(self, batch: ForwardBatch, places: Tensor, pool: KVPool) -> None:
        """After `follow` of a step with drafts, and its verdict: its rows go on behind these.

        Args:
            places: int64 [num_rows], of the last token that stands among the step's.
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
        """Before a step with drafts: its token ids, with what is drawn in place of each TO_GUESS.

        Args:
            num_rows: that have one draft at least, two, and so on; rows with more come first.
        """
        view, firsts = _view(pool), batch.query_starts[:-1].long()
        kept, token_ids = Kept(view.tokens, _TABLE, {}), batch.token_ids.clone()
        vectors = _vectors_before(batch, view, pool.layout.page_size)
        for number, rows in enumerate(num_rows):
            places = firsts[:rows] + number
            one = _one_token(batch, token_ids, places)
            embeddings = self._embed(one.token_ids, future_tokens)
            vectors = self.layer.forward(vectors[:rows], embeddings, Step(one), kept)
            drawn = draw(self.layer.logits(vectors, self._logits), number).clamp_(min=0)
            drafts = token_ids[places + 1]
            token_ids[places + 1] = torch.where(drafts == TO_GUESS, drawn, drafts)
        return token_ids


def _view(pool: KVPool) -> DraftView:
    assert pool.draft is not None
    return pool.draft


def _vectors_before(batch: ForwardBatch, view: DraftView, page_size: int) -> Tensor:
    """Of the token before each row's first, [num_rows, hidden]; of none, whatever there is."""
    before = batch.positions[batch.query_starts[:-1]] - 1
    if not len(batch.page_ids):  # no row has begun
        return view.vectors.new_zeros(len(before), view.vectors[0].numel())
    places = batch.page_starts[_TABLE] + before.clamp(min=0) // page_size
    return view.vectors[batch.page_ids[places].long()].flatten(1)


def _newest_of_pages(batch: ForwardBatch, page_size: int) -> Tensor:
    """The page of each token that is the newest there once the step is over; -1 of others."""
    locations = batch.locations[_TABLE]
    newest = (locations + 1) % page_size == 0
    newest.index_fill_(0, batch.query_starts[1:].long() - 1, True)
    return torch.where(newest, locations // page_size, -1)


def _store(vectors: Tensor, pages: Tensor, view: DraftView) -> None:
    key, value = vectors.view(len(vectors), 1, 2, -1).unbind(dim=2)
    store_kv(key, value, view.vectors, pages)


def _one_token(batch: ForwardBatch, token_ids: Tensor, places: Tensor) -> ForwardBatch:
    """A decode step of the first rows of a batch: of each the token at one of its places."""
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

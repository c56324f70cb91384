"""A draft layer that runs over the target model's pages.

The KV of a token is computed from the token and the target model's hidden state of the token before
it. It depends on no later token, so it is stored in the token's page and moves with that page. The
hidden state that the next step needs is stored there, too: each page has the hidden state of its
newest token. Any node that continues after a token has that page.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import DRAFT_TABLE, DraftView
from engine.models.blocks.layer import KeptStates, ModelStep
from engine.models.drafting.drawing import view_of
from engine.models.drafting.protocol import DraftLayer, ModelVectors
from kernels.pages.store_kv import store_kv


class DraftHead:
    """A draft layer that runs after the target model, see DeviceDrafter.

    Args:
        embed: returns the embeddings of a batch's token ids, like the target model. Also gets the
            tokens of the future map.
        logits: the target model's head.
    """

    def __init__(
        self,
        layer: DraftLayer,
        embed: Callable[[Tensor, Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.layer = layer
        self._embed = embed
        self._logits = logits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layer.taps

    @property
    def parts(self) -> Sequence[object]:
        return (self.layer,)

    def follow(
        self, step: ModelStep, seen: ModelVectors, future_tokens: Tensor, pool: KVPool
    ) -> None:
        batch, view, page_size = step.batch, view_of(pool), pool.layout.page_size
        own = self.layer.vectors(seen.hidden, step)
        vectors = own.roll(1, 0)
        # Rows without tokens come last. They start after the last token.
        firsts = batch.query_starts[:-1].clamp(max=len(own) - 1)
        vectors[firsts] = _vectors_before(batch, view, page_size)
        self.layer.keep(vectors, seen.embeddings, step, _kept(view))
        _store(own, _newest_of_pages(batch, page_size), view)
        if step.late is not None:
            locations = batch.locations[DRAFT_TABLE]
            step.late.add_drafter(
                lambda places: _store(own[places], locations[places] // page_size, view)
            )

    def before(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        return _vectors_before(batch, view_of(pool), pool.layout.page_size)

    def advance(
        self, one: ForwardBatch, vectors: Tensor, future_tokens: Tensor, pool: KVPool
    ) -> Tensor:
        embeddings = self._embed(one.token_ids, future_tokens)
        return self.layer.forward(vectors, embeddings, ModelStep(one), _kept(view_of(pool)))

    def logits(self, vectors: Tensor) -> Tensor:
        return self.layer.logits(vectors, self._logits)


def _kept(view: DraftView) -> KeptStates:
    return KeptStates(view.layers[0], DRAFT_TABLE, {})


def _vectors_before(batch: ForwardBatch, view: DraftView, page_size: int) -> Tensor:
    """Return the hidden state of the token before each row's first token, [num_rows, hidden].
    Undefined for rows at position 0."""
    before = batch.starts - 1
    if not len(batch.page_ids):  # every row starts at position 0
        return view.vectors.new_zeros(len(before), view.vectors[0].numel())
    places = batch.page_starts[DRAFT_TABLE] + before.clamp(min=0) // page_size
    return view.vectors[batch.page_ids[places].long()].flatten(1)


def _newest_of_pages(batch: ForwardBatch, page_size: int) -> Tensor:
    """Return the page of each token that is the newest token in its page after the step, and -1 for
    other tokens."""
    locations = batch.locations[DRAFT_TABLE]
    newest = (locations + 1) % page_size == 0
    newest.index_fill_(0, batch.query_starts[1:].long() - 1, True)
    return torch.where(newest, locations // page_size, -1)


def _store(vectors: Tensor, pages: Tensor, view: DraftView) -> None:
    key, value = vectors.view(len(vectors), 1, 2, -1).unbind(dim=2)
    store_kv(key, value, view.vectors, pages)

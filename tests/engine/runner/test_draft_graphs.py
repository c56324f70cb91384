"""Drafts that the device draws one by one, with a drafter that counts."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from engine.batch.batch import TO_GUESS
from engine.batch.forward import ForwardBatch
from engine.batch.graph_shapes import GraphShape
from engine.runner.draft_graphs import GraphDrafter
from engine.runner.rehearsal import padding
from kernels.sampling.sample import SamplingColumns

CPU = torch.device("cpu")
VOCABULARY = 20


def vectors_before(batch: ForwardBatch) -> Tensor:
    return torch.full((batch.num_rows, VOCABULARY), torch.nan)


def next_tokens(one: ForwardBatch, vectors: Tensor) -> Tensor:
    """Return vectors that are also logits. The likeliest token is the next number."""
    return F.one_hot(one.token_ids.long() + 1, VOCABULARY).float()


def greedy(num_rows: int) -> SamplingColumns:
    ints, floats = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows)
    return SamplingColumns(
        floats, ints, torch.ones(num_rows), floats, torch.zeros(num_rows, 2).int(), ints
    )


@pytest.mark.parametrize("num_rows", [3, 2, 0])
def test_drafts_replace_placeholders_of_the_steps_rows(num_rows: int) -> None:
    """Drafts of the host stay, and the next ones follow them. Nothing else changes, in particular
    no padding."""
    given = [5, TO_GUESS, TO_GUESS, TO_GUESS, 7, 12, TO_GUESS, 3, TO_GUESS, 1, TO_GUESS, 0]
    drawn = [5, 6, 7, 8, 7, 12, 13, 3, 4, 1, TO_GUESS, 0]
    starts, ends = np.array([0, 4, 7, 9, 12], np.int32), {3: 9, 2: 7, 0: 0}
    step = padding(GraphShape(12, 4, late=True), 1)
    batch, _ = replace(step, token_ids=np.array(given, np.int32), query_starts=starts).to(CPU)
    drafter = GraphDrafter(vectors_before, next_tokens, lambda vectors: vectors)
    count = torch.tensor([num_rows], dtype=torch.int32)
    drafter.allocate(batch, 4)
    drafter.begin(batch, count)
    # Vectors of padding may be undefined.
    assert drafter.vectors[:num_rows].isnan().all() and (drafter.vectors[num_rows:] == 0).all()
    for _ in range(3):
        drafter.advance(batch, count)
        drafter.draw(batch, count, greedy(12))
    end = ends[num_rows]
    assert batch.token_ids.tolist() == drawn[:end] + given[end:]

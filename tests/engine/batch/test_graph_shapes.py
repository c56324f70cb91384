"""The shapes of graphs: every step of a decode node finds one, and its padding fits."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import SHORT_TOKENS, GraphShape, graph_shapes
from engine.models.drafting import live_token
from engine.runner.rehearsal import padding
from kernels.linear_attention.state_cells import FEW

CPU = torch.device("cpu")


def step_of(counts: list[int], state_pages: int = 0) -> HostBatch:
    """Return a step with rows of these numbers of tokens, as far as its shape depends on it."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    made = padding(GraphShape(int(starts[-1]), len(counts)), 1, state_pages=state_pages)
    made = replace(made, query_starts=starts)
    long = [row for row, count in enumerate(counts) if count > 1]
    num_decodes = len(counts) - 1 - long[-1] if long else len(counts)
    return replace(made, sampled=made.sampled[: len(counts)], num_decodes=num_decodes)


def fitting(shapes: tuple[GraphShape, ...], batch: HostBatch, **kind: bool) -> list[GraphShape]:
    wanted = GraphShape(0, 0, **kind)[2:]
    return [
        shape
        for shape in shapes
        if shape[2:] == wanted and shape.is_ragged != batch.is_decode and shape.fits(batch)
    ]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 64, 256, 500])
@pytest.mark.parametrize("adapted", [False, True])
def test_every_step_with_drafts_or_of_decode_rows_or_of_a_short_prompt_has_a_shape(
    max_rows: int, adapted: bool
) -> None:
    shapes, rng = graph_shapes(max_rows, late=True, adapted=adapted), random.Random(max_rows)
    assert len(shapes) < 70 * (1 + adapted) + 70 * (1 + adapted)
    for num_rows in {1, max_rows, rng.randint(1, max_rows)}:
        assert fitting(shapes, step_of([1] * num_rows), adapted=adapted)
    for _ in range(100):
        num_rows = rng.randint(1, max_rows)
        drafts, counts = rng.randint(0, max_rows - num_rows), [1] * num_rows
        for _ in range(drafts):  # as many tokens as slots
            counts[rng.randrange(num_rows)] += 1
        counts.sort(reverse=True)
        if drafts:
            assert fitting(shapes, step_of(counts), late=True, adapted=adapted)
        prompt = rng.randint(2, SHORT_TOKENS - max(num_rows, 2)) if num_rows < 200 else 2
        if prompt + num_rows < SHORT_TOKENS:
            assert fitting(shapes, step_of([prompt, *[1] * num_rows]), adapted=adapted)


def test_padding_does_not_change_how_recurrent_layers_compute_rows() -> None:
    shapes = graph_shapes(16, late=True, adapted=False)
    for counts in ([200], [64, 1, 1], [FEW, 2], [5], [40, *[1] * 20]):
        batch = step_of(counts, state_pages=1)
        is_long = batch.to(CPU)[0].states.has_long_rows(sum(counts))
        for shape in fitting(shapes, batch):
            assert (shape.tokens > FEW * shape.rows) == is_long
    assert fitting(shapes, step_of([200], state_pages=1))
    assert fitting(shapes, step_of([5], state_pages=1))


def test_rows_without_a_draft_are_padding_while_others_are_drafted() -> None:
    batch = replace(
        step_of([3, 2, 1]),
        token_ids=np.arange(1, 7, dtype=np.int32),
        locations=(np.arange(20, 26),),
        lengths=np.array([9, 5, 7], np.int32),
    )
    for number, num_rows, token_ids, locations, lengths in (
        (0, 3, [1, 4, 0], [20, 23, -1], [7, 4, 0]),
        (1, 3, [2, 0, 0], [21, -1, -1], [8, 0, 0]),
        (0, 1, [1, 0, 0], [20, -1, -1], [7, 0, 0]),
    ):
        count = torch.tensor([num_rows], dtype=torch.int32)
        one = live_token(batch.to(CPU)[0], torch.tensor([number]), count)
        assert one.token_ids.tolist() == token_ids
        assert one.locations[0].tolist() == locations
        assert one.lengths.tolist() == lengths
        assert one.is_decode


@pytest.mark.parametrize("counts", [[3], [1, 1], [4, 2, 1], [1] * 5])
@pytest.mark.parametrize("shape", [GraphShape(9, 7), GraphShape(64, 17), GraphShape(12, 11)])
def test_padding_rows_share_the_surplus_tokens(counts: list[int], shape: GraphShape) -> None:
    starts = np.cumsum([0, *counts], dtype=np.int32)
    padded = shape.padded_starts(starts)
    assert padded.dtype == np.int32 and len(padded) == shape.rows + 1
    assert padded[: len(starts)].tolist() == starts.tolist() and padded[-1] == shape.tokens
    added = np.diff(padded)[len(counts) :]
    surplus = shape.tokens - sum(counts)
    assert added.sum() == surplus and added[0] > 0
    assert added.max() <= -(-surplus // len(added))
    assert (np.diff(added) <= 0).all()

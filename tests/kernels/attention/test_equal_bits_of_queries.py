"""Attention on a CPU gives the same bits for a query in a decode step and in a prompt."""

import random

import pytest
import torch

from kernels.cpu.operators import DTYPES, Operators

SIZES = [10, 24, 64, 96, 128, 256]
LENGTHS = [1, 15, 16, 63, 64, 65, 127, 128, 511, 512, 513, 700, 1024, 1100]


class Layout:
    """Random keys and values of one long row, and a query for each of its tokens."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        self.length = draw.choice(LENGTHS) if draw.random() < 0.7 else draw.randint(1, 1400)
        self.kv_heads, group = draw.choice([1, 2]), draw.choice([1, 2, 3, 4, 7])
        self.heads, self.size = self.kv_heads * group, draw.choice(SIZES)
        self.window = draw.choice([None, None, 7, 100, 600])
        self.soft_cap = draw.choice([None, None, 5.0])
        self.sinks = torch.randn(self.heads) if draw.random() < 0.3 else None
        self.dtype = dtype
        # Large queries often raise the largest score.
        sharpness = draw.choice([0.1, 1.0, 10.0])
        self.queries = (torch.randn(self.length, self.heads, self.size) * sharpness).to(dtype)
        self.numbers = torch.randn(2, self.length, self.kv_heads, self.size).to(dtype)

    def attend(
        self, operators: Operators, page_size: int, rows: list[tuple[int, int]], *, decode: bool
    ) -> torch.Tensor:
        """Attend from queries [start, end) of each row, which end at token `end`. All rows share
        the pages, and everything after the last token is NaN."""
        num_pages = -(-self.length // page_size)
        shape = (num_pages + 2, self.kv_heads, 2, page_size, self.size)
        kv = torch.full(shape, torch.nan, dtype=self.dtype)
        pages = torch.randperm(num_pages + 2)[:num_pages]
        tokens = torch.arange(self.length)
        for vector in (0, 1):
            places = (pages[tokens // page_size], slice(None), vector, tokens % page_size)
            kv[places] = self.numbers[vector]
        q = torch.cat([self.queries[start:end] for start, end in rows])
        out = torch.full((len(q), self.heads * self.size), torch.nan, dtype=self.dtype)
        lengths = _ints(end for _, end in rows)
        places = _ints(0 for _ in rows)
        options = {
            "window": self.window,
            "scale": self.size**-0.5,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
        }
        ids = pages.int()
        if decode:
            operators.decode_attention(q, kv, ids, places, lengths, out, **options)
        else:
            counts = [0, *(end - start for start, end in rows)]
            starts = _ints(sum(counts[: row + 1]) for row in range(len(counts)))
            operators.extend_attention(q, kv, ids, places, starts, lengths, out, **options)
        return out


def compare(operators: list[Operators], seed: int, dtype: torch.dtype) -> None:
    """Compare all kinds of steps for some tokens of a layout."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layout = Layout(draw, dtype)
    page_sizes = draw.sample([16, 32, 64, 128], 2)
    tokens = sorted({layout.length - 1, *(draw.randrange(layout.length) for _ in range(6))})
    rows = [(token, token + 1) for token in tokens]
    team = draw.choice(operators)
    alone = [layout.attend(operators[0], page_sizes[0], [row], decode=True)[0] for row in rows]
    together = layout.attend(team, page_sizes[1], rows, decode=True)
    whole = layout.attend(team, page_sizes[0], [(0, layout.length)], decode=False)[tokens]
    start = draw.randrange(layout.length)
    end = draw.randint(start + 1, layout.length)
    chunks = [row for row in [(0, start), (start, end), (end, layout.length)] if row[0] < row[1]]
    draw.shuffle(chunks)
    attended = layout.attend(team, page_sizes[1], chunks, decode=False)
    place = [i for first, past in chunks for i in range(first, past)]
    in_chunks = attended[[place.index(token) for token in tokens]]
    expected = torch.stack(alone)
    assert not expected.isnan().any()
    for name, actual in (("batch", together), ("prompt", whole), ("chunks", in_chunks)):
        differing = int((actual != expected).sum())
        assert not differing, f"{name}: {differing} of {actual.numel()} numbers differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_and_extend_give_the_same_bits(teams, dtype):
    for seed in range(8):
        compare(teams, seed, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_and_extend_give_the_same_bits_in_many_layouts(teams, dtype):
    for seed in range(8, 120):
        compare(teams, seed, dtype)


def _ints(numbers) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)

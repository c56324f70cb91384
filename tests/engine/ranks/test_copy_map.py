"""Reads between nodes with different numbers of ranks, by brute force and without processes.

The pages of each rank are filled through its layout's own views. The heads of a rank follow from
formulas of this module, not from the product's. Every tensor of a model has random bytes, so
misplaced bytes are detected.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from common.copy_map import Atom, AtomKey, RankPages, Slice, copy_map
from common.errors import ConfigError, LayoutMismatch
from common.limits import MAX_RANKS
from engine.kv_cache.layout import NO_TABLE, KVLayout
from engine.kv_cache.states import (
    DraftState,
    LayerState,
    PagedKV,
    PagedLatent,
    RecurrentState,
    StateCells,
)

PAGES_PER_TABLE = 2
Make = Callable[..., Tensor]  # (what, shape, dtype): a tensor of the model


def heads_of(count: int, place: int, tp: int) -> list[int]:
    if tp > count:
        return [place // (tp // count)]
    return [head for head in range(count) if head // (count // tp) == place]


def kept_heads(state: LayerState, place: int, tp: int) -> list[int]:
    count = state.shape[0]
    return list(range(count)) if state in WHOLE_ON_RANKS else heads_of(count, place, tp)


def stages_of(num_layers: int, pp: int) -> list[range]:
    edges = [num_layers * stage // pp for stage in range(pp + 1)]
    return [range(first, past) for first, past in itertools.pairwise(edges)]


def is_served(layout: KVLayout, tp: int, pp: int) -> bool:
    """Return whether a node of tp x pp ranks can serve the model, by rules of this module."""
    states = [place.state for place in layout.places]
    if layout.draft is not None:
        states.extend(layout.draft.state.layers)
    split = [state for state in states if state.token_numbers and state not in WHOLE_ON_RANKS]
    counts = [state.shape[0] for state in split]
    cells = [each.count for state in states for each in state.cells]
    stages = stages_of(len(layout.places), pp)
    return (
        all(count % tp == 0 or tp % count == 0 for count in counts)
        and all(count % tp == 0 for count in cells)
        and all(any(states[layer].token_numbers for layer in stage) for stage in stages)
    )


def random_model(seed: int) -> Make:
    """Return tensors of the whole model. The same name is the same tensor."""
    made: dict[object, Tensor] = {}
    rng = torch.Generator().manual_seed(seed)

    def make(what: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if what not in made:
            size = (*shape[:-1], shape[-1] * dtype.itemsize)
            made[what] = torch.randint(256, size, dtype=torch.uint8, generator=rng).view(dtype)
        return made[what]

    return make


def all_ones(what: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank with the pages of one request.

    tables: page ids by table. memory: the pages. used: bytes that it uses.
    """

    number: int
    pages: RankPages
    tables: list[NDArray[np.intp]]
    state: NDArray[np.intp]
    memory: NDArray[np.uint8]
    used: NDArray[np.bool_]


def ranks_of(whole: KVLayout, tp: int, pp: int, make: Make, seed: int) -> list[Rank]:
    """Return all ranks of a node whose pages hold a request."""
    return [
        _rank(whole, stage * tp + place, (place, tp, layers), make, seed)
        for stage, layers in enumerate(stages_of(len(whole.places), pp))
        for place in range(tp)
    ]


def _rank(
    whole: KVLayout, number: int, share: tuple[int, int, range], make: Make, seed: int
) -> Rank:
    layout, num_tables = whole.share(*share), len(whole.windows)
    num_pages = num_tables * PAGES_PER_TABLE + layout.state_pages
    ids = np.random.default_rng(seed).permutation(num_pages + 2)
    tables = list(ids[: num_tables * PAGES_PER_TABLE].reshape(num_tables, PAGES_PER_TABLE))
    state = ids[num_tables * PAGES_PER_TABLE : num_pages]
    memory, used = (torch.zeros(num_pages + 2, layout.page_bytes, dtype=torch.uint8) for _ in "ab")
    for pages, values in ((memory, make), (used, all_ones)):
        _fill(whole, layout, share, pages, tables, state, values)
    pages = whole.rank_pages(*share)
    return Rank(number, pages, tables, state, memory.numpy(), used.numpy() == 255)


def _fill(
    whole: KVLayout,
    layout: KVLayout,
    share: tuple[int, int, range],
    pages: Tensor,
    tables: list[NDArray[np.intp]],
    state: NDArray[np.intp],
    make: Make,
) -> None:
    place, tp, layers = share
    for number, layer in enumerate(layers):
        kept, table = whole.places[layer].state, whole.places[layer].table
        if table != NO_TABLE:
            heads, vectors, size = kept.shape
            shape = (PAGES_PER_TABLE, heads, vectors, whole.page_size, size)
            values = make(layer, shape, whole.dtype)[:, kept_heads(kept, place, tp)]
            layout.view(pages, number)[tables[table]] = values
        for cells in kept.cells:
            view = layout.cells(pages, number)[cells.name]
            dtype = cells.dtype or whole.cell_dtype
            values = make((layer, cells.name), (1, cells.count, *cells.shape), dtype)
            own = values[:, heads_of(cells.count, place, tp)]
            view.write(torch.from_numpy(state)[None], own)
    if whole.draft is not None and (view := layout.draft_view(pages)) is not None:
        for number, kept in enumerate(whole.draft.state.layers):
            heads, vectors, size = kept.shape
            shape = (PAGES_PER_TABLE, heads, vectors, whole.page_size, size)
            values = make(("draft", number), shape, whole.dtype)[:, kept_heads(kept, place, tp)]
            view.layers[number][tables[0]] = values
        shape = (PAGES_PER_TABLE, 1, 2, 1, whole.draft.state.vector // 2)
        if whole.draft.state.vector:
            view.vectors[tables[0]] = make("vector", shape, whole.cell_dtype)


def check_read(consumer: Rank, producers: list[Rank]) -> tuple[tuple[Slice, ...], ...]:
    """Read by the map into empty pages, and compare them with the pages as the consumer would
    fill them. Every used byte is read exactly once. No other page is written."""
    moves = copy_map(consumer.number, consumer.pages, [producer.pages for producer in producers])
    memory, times = np.zeros_like(consumer.memory), np.zeros(consumer.memory.shape, np.uint8)
    for table, slices in enumerate(moves[:-1]):
        here = consumer.tables[table]
        for producer, _, source, _, at, size in slices:
            there = producers[producer].tables[table]
            memory[here, at : at + size] = producers[producer].memory[there, source : source + size]
            times[here, at : at + size] += 1
    for producer, source_page, source, page, at, size in moves[-1]:
        there, here = producers[producer].state[source_page], consumer.state[page]
        memory[here, at : at + size] = producers[producer].memory[there, source : source + size]
        times[here, at : at + size] += 1
    assert (memory[consumer.used] == consumer.memory[consumer.used]).all()
    assert (times[consumer.used] == 1).all()
    assert times.max() == 1
    unused = np.setdiff1d(
        np.arange(len(memory)), np.concatenate([*consumer.tables, consumer.state])
    )
    assert not times[unused].any()
    return moves


def net(values: int, keys: int) -> RecurrentState:
    """Return a small delta net."""
    return RecurrentState(
        (StateCells("delta", values, (3, 4), torch.float32), StateCells("conv", keys, (6, 3)))
    )


DENSE, WIDE, WINDOW = PagedKV(8, 4), PagedKV(16, 2), PagedKV(8, 4, 40)
LATENT = PagedLatent(12)
WHOLE_ON_RANKS = [PagedKV(6, 4, split=False), PagedKV(6, 4, 40, split=False)]
MODELS: dict[str, tuple[list[LayerState], DraftState | None]] = {
    "dense": ([DENSE] * 3, None),
    "16 heads": ([WIDE] * 4, None),
    "one head": ([PagedKV(1, 6)] * 3, None),
    "two heads, a window": ([PagedKV(2, 6, 40)] * 3, None),
    "windows": ([DENSE, *[WINDOW] * 5, DENSE, WINDOW], None),
    "several shapes": ([DENSE, PagedKV(2, 8), PagedKV(4, 8, 24), DENSE, PagedKV(2, 8, 24)], None),
    "latents": ([LATENT] * 4, None),
    "whole heads on ranks": ([*WHOLE_ON_RANKS, WHOLE_ON_RANKS[1]], None),
    "whole heads beside others": ([DENSE, WHOLE_ON_RANKS[0]], None),
    "latents and heads": ([LATENT, DENSE, LATENT], None),
    "delta nets": ([net(16, 8), net(16, 8), DENSE] * 2, None),
    "delta nets of two shapes": ([net(16, 16), net(32, 16), LATENT, WIDE], None),
    "delta nets and latents": ([net(16, 16), LATENT, net(16, 16), LATENT], None),
    "drafter": ([DENSE] * 2, DraftState((PagedKV(4, 6),), 10)),
    "drafter with latents": ([LATENT, net(8, 8), LATENT], DraftState((LATENT,), 10)),
    "drafter with windows": ([PagedKV(2, 8), *[PagedKV(4, 4, 40)] * 3], DraftState((DENSE,), 6)),
    "draft model": ([DENSE] * 2, DraftState((*[PagedKV(4, 6)] * 2, PagedKV(2, 8, 40)))),
}
NARROW = {"bf16": None, "fp8": torch.float8_e4m3fn}


def layout_of(model: str, kept_in: str, page_size: int = 16) -> KVLayout:
    layers, draft = MODELS[model]
    return KVLayout.of(layers, page_size, torch.bfloat16, NARROW[kept_in], draft)


def check_pairs(whole: KVLayout, sizes: Sequence[tuple[int, int]], seed: int = 0) -> int:
    """Check all pairs of nodes of these sizes. Return the number of maps."""
    make = random_model(seed)
    served = [size for size in sizes if is_served(whole, *size)]
    for size in set(sizes) - set(served):
        with pytest.raises(ConfigError, match=r"\d"):
            ranks_of(whole, *size, make, 0)
    producers = {size: ranks_of(whole, *size, make, 1) for size in served}
    num_maps = 0
    for size in served:
        for consumer, (producer_size, producer) in itertools.product(
            ranks_of(whole, *size, make, 2), producers.items()
        ):
            num_maps += 1
            stages = [each.pages.layers for each in producer]
            if len(whole.windows) > 1 and consumer.pages.layers not in stages:
                with pytest.raises(LayoutMismatch, match=f"has {len(whole.windows)}"):
                    copy_map(consumer.number, consumer.pages, [each.pages for each in producer])
                continue
            moves = check_read(consumer, producer)
            if producer_size[1] == size[1]:
                most = 3 if whole.draft else 1
                for table in moves[:-1]:
                    read = [each.producer_rank for each in table]
                    assert all(read.count(producer) <= most for producer in read)
    return num_maps


@pytest.mark.parametrize("kept_in", NARROW)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_reads_every_byte_once_from_any_number_of_ranks(model: str, kept_in: str) -> None:
    check_pairs(layout_of(model, kept_in), [(1, 1), (2, 1), (4, 1), (2, 2)])


@pytest.mark.long
def test_ranks_of_many_numbers_read_every_byte_once() -> None:
    sizes = list(itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3)))
    checked = [
        check_pairs(layout_of(model, kept_in), sizes)
        for model, kept_in in itertools.product(MODELS, NARROW)
    ]
    assert sum(checked) > 30_000


def enough(error: ConfigError) -> int:
    return int(re.findall(r"(\d+) are enough", str(error))[0])


LARGE = RecurrentState((StateCells("delta", 8, (10, 10), torch.float32),))
KINDS = [DENSE, WINDOW, LATENT, PagedKV(2, 6), PagedKV(1, 10, 24), net(4, 2), net(8, 8), LARGE]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6).filter(
        lambda layers: any(each.token_numbers for each in layers)
    ),
    st.sampled_from([None, DraftState((PagedKV(2, 6), DENSE)), DraftState((LATENT,), 2)]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from(list(NARROW)),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 2)), min_size=2, max_size=3, unique=True),
)
def test_ranks_of_any_model_read_every_byte_once(
    layers: list[LayerState],
    draft: DraftState | None,
    page_size: int,
    kept_in: str,
    sizes: list[tuple[int, int]],
) -> None:
    """If a page is too small for a cell of a rank, it is enlarged as the error says."""
    if all(each.window for each in layers if each.token_numbers):
        draft = None

    def laid_out(page_size: int) -> KVLayout:
        return KVLayout.of(layers, page_size, torch.bfloat16, NARROW[kept_in], draft)

    try:
        whole = laid_out(page_size)
    except ConfigError as error:
        whole = laid_out(enough(error))
    for tp, pp in sizes:
        if is_served(whole, tp, pp):
            try:
                ranks_of(whole, tp, pp, all_ones, 0)
            except ConfigError as error:
                whole = laid_out(enough(error))
                ranks_of(whole, tp, pp, all_ones, 0)
    check_pairs(whole, sizes)


def test_one_rank_has_the_whole_layout_and_reads_pages_as_one_slice() -> None:
    for model, kept_in in itertools.product(MODELS, NARROW):
        whole = layout_of(model, kept_in)
        layers = range(len(whole.places))
        assert whole.share(0, 1, layers) == whole
        pages = whole.rank_pages(0, 1, layers)
        *tables, state = copy_map(0, pages, [pages])
        assert all(len(table) == 1 and table[0].at == 0 for table in tables)
        assert [each.page for each in state] == list(range(whole.state_pages))


def test_ranks_with_the_same_head_are_read_in_turn() -> None:
    whole = layout_of("latents", "bf16")
    ranks = [whole.rank_pages(place, 4, range(4)) for place in range(4)]
    producers = [
        copy_map(consumer, ranks[consumer], ranks[:2])[0][0].producer_rank for consumer in range(4)
    ]
    assert producers == [0, 1, 0, 1]


def test_pages_are_smaller_by_the_heads_that_a_rank_lacks_and_states_have_their_own_count() -> None:
    """A fourth of the cells, but half of a page: 2 heads for 4 ranks."""
    layers = [*[RecurrentState((StateCells("delta", 16, (8, 8), torch.float32),))] * 3, DENSE]
    whole = KVLayout.of([*layers[:3], PagedKV(2, 16)], 16, torch.bfloat16)
    halves, fourths = (whole.share(0, tp, range(4)) for tp in (2, 4))
    assert [each.page_bytes for each in (whole, halves, fourths)] == [2048, 1024, 1024]
    assert [each.state_pages for each in (whole, halves, fourths)] == [6, 6, 3]
    assert whole.tables.windows == fourths.tables.windows


@pytest.mark.parametrize(
    "model, share, message",
    [
        ("dense", (0, 3, range(3)), "3 ranks .* 8 KV heads"),
        ("dense", (0, 12, range(3)), "12 ranks .* 8 KV heads"),
        ("delta nets", (0, 16, range(6)), "16 ranks .* 8 heads of 'conv'"),
        ("delta nets", (0, 1, range(2)), "no layer from 0 to 1 keeps"),
        ("dense", (1, 1, range(3)), "no rank 1 of 1"),
        ("one head", (0, 10**6, range(3)), f"of 1000000: .* at most {MAX_RANKS}"),
        ("one head", (0, 2**70, range(3)), "at most"),
        ("one head", (-1, 2, range(3)), "no rank -1"),
        ("dense", (0, 1, range(10**9)), "3 layers"),
        ("dense", (0, 1, range(2, 1)), "3 layers"),
        ("dense", (0, 1, range(-1, 2)), "3 layers"),
    ],
)
def test_an_impossible_rank_is_rejected_with_the_numbers(
    model: str, share: tuple[int, int, range], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(model, "bf16").share(*share)


def test_a_cell_larger_than_a_page_of_a_rank_is_rejected_with_a_page_size() -> None:
    cells = StateCells("delta", 2, (256, 4), torch.float32)
    layers = [RecurrentState((cells,)), PagedKV(2, 4)]
    whole = KVLayout.of(layers, 128, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"128 tokens .* 2048 .* 4096; 256 are enough"):
        whole.share(0, 2, range(2))
    assert KVLayout.of(layers, 256, torch.bfloat16).share(0, 2, range(2)).state_pages == 1


KEY = AtomKey("tokens", 0, 0)


def pages_with(*atoms: Atom, page_bytes: int = 64, tables: int = 1) -> RankPages:
    """Return a rank with these atoms, one for each layer."""
    keys = (KEY._replace(layer=layer) for layer in range(len(atoms)))
    return RankPages(page_bytes, 0, range(1), (dict(zip(keys, atoms, strict=True)), *[{}] * tables))


GOOD = pages_with(Atom(0, 0, 64))


@pytest.mark.parametrize(
    "consumer, mine, producers, message",
    [
        (0, GOOD, [], "0 ranks"),
        (0, GOOD, [GOOD] * 10**6, f"1000000 ranks: .* {MAX_RANKS}"),
        (10**6, GOOD, [GOOD], "rank 1000000"),
        (-1, GOOD, [GOOD], "rank -1"),
        (0, GOOD, [pages_with(Atom(0, 0, 64), tables=2)], "2 tables .* 1 here"),
        (0, GOOD, [pages_with(Atom(0, 1, 64))], "64 bytes at 1 .* 64"),
        (0, GOOD, [pages_with(Atom(0, -1, 64))], "at -1"),
        (0, GOOD, [pages_with(Atom(0, 0, 0))], "0 bytes"),
        (0, GOOD, [pages_with(Atom(0, 2**64 - 64, 64))], "outside"),
        (0, GOOD, [pages_with(Atom(0, 0, 2**64))], "outside"),
        (0, GOOD, [pages_with(Atom(1, 0, 64))], "page 1 "),
        (0, pages_with(Atom(0, 32, 64)), [GOOD], "at 32"),
        (0, GOOD, [pages_with(Atom(0, 0, 32))], "32 bytes at the producer, 64 here"),
        (0, GOOD, [pages_with()], "no rank of the producer"),
    ],
)
def test_impossible_combinations_of_ranks_are_rejected_with_the_numbers(
    consumer: int, mine: RankPages, producers: list[RankPages], message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        copy_map(consumer, mine, producers)

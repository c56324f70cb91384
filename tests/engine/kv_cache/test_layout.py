"""Placement of layers in pages: layers with the same tokens share pages, and no layer is placed
twice."""

import pytest
import torch

from common.errors import ConfigError
from engine.kv_cache.layout import MAX_PADDING, TYPICAL_TOKENS, KVLayout
from engine.kv_cache.states import (
    DraftState,
    LayerState,
    PagedKV,
    PagedLatent,
    RecurrentState,
    StateCells,
)

BF16 = torch.bfloat16


def mixed(full: int, sliding: int, window: int, heads: int, head_dim: int) -> list[PagedKV]:
    return [PagedKV(heads, head_dim)] * full + [PagedKV(heads, head_dim, window)] * sliding


def test_layers_with_the_same_tokens_share_one_table_in_order():
    layout = KVLayout.of([PagedKV(2, 8)] * 3, 16, BF16)
    assert layout.windows == (None,)
    assert [(place.table, place.index) for place in layout.places] == [(0, 0), (0, 1), (0, 2)]
    assert layout.page_bytes == 2 * 3 * 2 * 16 * 8 * 2
    assert layout.padding == 0


@pytest.mark.parametrize(
    "layers, full_tables, window_tables, padding",
    [
        pytest.param(mixed(13, 13, 4096, 4, 256), 1, 1, 0.0, id="gemma 2 2B"),
        pytest.param(mixed(12, 12, 128, 8, 64), 1, 1, 0.0, id="gpt-oss 20B"),
        pytest.param(mixed(8, 40, 1024, 8, 256), 1, 5, 0.0, id="gemma 3 12B"),
        pytest.param(mixed(5, 29, 1024, 4, 256), 1, 6, 0.026, id="gemma 3 4B"),
        pytest.param(mixed(10, 52, 1024, 16, 128), 2, 11, 0.042, id="gemma 3 27B"),
        pytest.param(mixed(0, 32, 4096, 8, 128), 0, 1, 0.0, id="mistral 0.1"),
    ],
)
def test_kinds_of_layers_are_grouped_into_tables_that_waste_little(
    layers: list[PagedKV], full_tables: int, window_tables: int, padding: float
) -> None:
    layout = KVLayout.of(layers, 16, BF16)
    assert layout.tables.num_full == full_tables
    assert layout.tables.num_tables == full_tables + window_tables
    assert layout.padding == pytest.approx(padding, abs=0.001)
    assert layout.padding <= MAX_PADDING


def test_a_long_request_of_gemma_3_27b_takes_a_fifth_of_the_memory_of_all_its_tokens():
    layout = KVLayout.of(mixed(10, 52, 1024, 16, 128), 16, BF16)
    num_tokens = TYPICAL_TOKENS[-1]
    held = layout.tables.pages_for(num_tokens) * layout.page_bytes
    assert held == pytest.approx(3.2e9, rel=0.03)
    assert num_tokens * layout.token_bytes == pytest.approx(16.6e9, rel=0.01)


@pytest.mark.parametrize(
    "layers",
    [
        mixed(3, 4, 40, 2, 8),
        [PagedKV(2, 8), PagedKV(1, 8), PagedKV(2, 8), PagedKV(4, 24, 30), PagedKV(1, 8, 30)],
        [PagedKV(1, 10)] + [PagedKV(2, 16, 100)] * 5,
        [PagedLatent(20)] * 3 + [PagedKV(2, 8), PagedLatent(12)],
    ],
    ids=["alike", "of several shapes", "one large", "latents"],
)
def test_every_number_of_a_layer_has_its_own_place(layers: list[LayerState]) -> None:
    layout = KVLayout.of(layers, 16, torch.float32)
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    by_table: dict[int, int] = {}
    for layer, state in enumerate(layers):
        view = layout.view(pages, layer)
        heads, vectors, size = state.shape
        assert view.shape == (3, heads, vectors, 16, size)
        assert layout.windows[layout.places[layer].table] == state.window
        table = layout.places[layer].table
        by_table[table] = by_table.get(table, 0) + view[0].numel() * 4
    for table, used in by_table.items():
        pages.zero_()
        for layer, place in enumerate(layout.places):
            if place.table == table:
                layout.view(pages, layer)[1].add_(1.0)
        written = pages.view(torch.float32)
        assert int((written[1] == 1.0).sum()) * 4 == used <= layout.page_bytes
        assert not written[[0, 2]].any()


def test_different_layouts_have_different_descriptions():
    layers = mixed(2, 2, 40, 2, 8)
    others = [mixed(2, 2, 48, 2, 8), mixed(2, 3, 40, 2, 8), mixed(2, 2, 40, 1, 8), layers[:2]]
    described = {KVLayout.of(each, 16, BF16).describe() for each in (layers, *others)}
    assert len(described) == 5
    assert KVLayout.of(layers, 16, BF16).describe() == (
        "head,layer,kv,token: 1 x (2 layers x 2 heads x 8), "
        "1 x (2 layers x 2 heads x 8 of 40 tokens)"
    )


def test_one_latent_vector_is_kept_for_any_number_of_heads():
    layout = KVLayout.of([PagedLatent(576)] * 61, 64, BF16)  # DeepSeek-V3
    assert layout.token_bytes == 61 * 576 * 2 and layout.padding == 0
    assert layout.page_bytes == 64 * layout.token_bytes
    assert layout.describe() == "head,layer,kv,token: 1 x (61 layers x a latent of 576)"


KV = PagedKV(2, 8)


def recurrent(heads: int = 3, size: int = 4) -> RecurrentState:
    return RecurrentState(
        (StateCells("delta", heads, (size, 5), torch.float32), StateCells("conv", 2, (7, 3)))
    )


@pytest.mark.parametrize("page_size", [4, 16])
def test_cells_of_all_heads_and_layers_are_in_the_pages_of_a_state_exactly_once(page_size):
    layers = [recurrent(), KV, recurrent(), recurrent(5), KV]
    layout = KVLayout.of(layers, page_size, BF16)
    assert layout.windows == (None,) and layout.tables.state_pages == layout.state_pages
    state = torch.arange(layout.state_pages, dtype=torch.int32)[None]
    pages = torch.zeros(layout.state_pages, layout.page_bytes, dtype=torch.uint8)
    used = 0
    for layer, kept in enumerate(layers):
        views = layout.cells(pages, layer)
        assert views.keys() == {cells.name for cells in kept.cells}
        for cells in kept.cells:
            found = views[cells.name].read(state)
            assert found.shape == (1, cells.count, *cells.shape)
            assert found.dtype == (cells.dtype or BF16) and not found.any()
            views[cells.name].write(state, torch.ones_like(found))
            used += found.numel() * found.itemsize
    assert int((pages != 0).sum()) <= used <= pages.nbytes
    for layer, kept in enumerate(layers):
        for cells in kept.cells:
            assert (layout.cells(pages, layer)[cells.name].read(state) == 1).all()


def test_a_state_of_qwen3_next_takes_as_many_pages_as_its_bytes_need():
    heads = 32, 16
    net = RecurrentState(
        (
            StateCells("delta", heads[0], (128, 128), torch.float32),
            StateCells("conv", heads[1], (2 * 128 + 2 * 128, 3)),
        )
    )
    layers = [net, net, net, PagedKV(2, 256)] * 12
    for page_size, state_pages in ((16, 197), (64, 50)):
        layout = KVLayout.of(layers, page_size, BF16)
        assert layout.token_bytes == 24576
        assert abs(layout.state_pages - state_pages) <= 1
        assert layout.state_pages * layout.page_bytes == pytest.approx(77.3e6, rel=0.03)


def test_different_states_have_different_descriptions():
    described = {
        KVLayout.of([KV, each], 16, BF16).describe()
        for each in (KV, recurrent(), recurrent(4), recurrent(3, 8))
    }
    assert len(described) == 4
    assert KVLayout.of([KV, recurrent()], 16, BF16).describe() == (
        "head,layer,kv,token: 1 x (1 layers x 2 heads x 8); head,layer: "
        "1 layers x 3 x delta (4 x 5 float32), 1 layers x 2 x conv (7 x 3 bfloat16)"
    )


def test_impossible_layouts_are_rejected():
    with pytest.raises(ConfigError, match=r"page_size: 4 tokens .* 20480; 256 are enough"):
        KVLayout.of([KV, recurrent(size=1024)], 4, torch.float32)
    with pytest.raises(ConfigError, match="without layers that keep"):
        KVLayout.of([recurrent()], 16, BF16)


def test_with_fewer_bits_pages_are_smaller_and_states_unchanged():
    layers = [PagedKV(2, 32), recurrent(), PagedKV(2, 32)]
    wide = KVLayout.of(layers, 16, BF16)
    narrow = KVLayout.of(layers, 16, BF16, torch.float8_e4m3fn)
    assert 2 * narrow.token_bytes == wide.token_bytes
    pages = torch.zeros(4, narrow.page_bytes, dtype=torch.uint8)
    assert narrow.view(pages, 0).dtype == torch.float8_e4m3fn
    kept = narrow.cells(pages, 1)
    wide_pages = torch.zeros(4, wide.page_bytes, dtype=torch.uint8)
    assert {name: each.view.dtype for name, each in kept.items()} == {
        name: each.view.dtype for name, each in wide.cells(wide_pages, 1).items()
    }


@pytest.mark.parametrize("vector", [10, 0])
def test_a_drafters_layers_are_after_the_others_in_the_pages_of_the_first_table(vector):
    """For any shape. Each has its own KV, and a drafter may have one vector for each page."""
    layers = [KV, KV, PagedKV(2, 8, window=64)]
    draft = DraftState((PagedKV(3, 4), PagedKV(1, 6, window=8)), vector)
    plain, layout = (
        KVLayout.of(layers, 16, torch.float32),
        KVLayout.of(layers, 16, torch.float32, draft=draft),
    )
    assert layout.tables == plain.tables
    assert layout.token_bytes == plain.token_bytes + (3 * 2 * 4 + 2 * 6) * 4
    kept = "1 layers x 3 heads x 4, 1 layers x 1 heads x 6"
    beside = f" and a vector of {vector}" if vector else ""
    assert layout.describe() == f"{plain.describe()}; drafter: {kept}{beside}"
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    view = layout.draft_view(pages)
    assert plain.draft_view(pages[:, : plain.page_bytes]) is None
    parts = [*view.layers, view.vectors, *(layout.view(pages, n) for n in range(2))]
    for number, part in enumerate(parts, start=1):
        part.fill_(number)
    for number, part in enumerate(parts, start=1):
        assert (part == number).all()
    assert [layer.shape for layer in view.layers] == [(3, 3, 2, 16, 4), (3, 1, 2, 16, 6)]
    assert view.vectors.shape == (3, 1, 2, 1, vector // 2)


def test_a_drafters_layer_requires_a_table_with_all_tokens():
    with pytest.raises(ConfigError, match="only sliding windows"):
        KVLayout.of([PagedKV(2, 8, window=64)], 16, BF16, draft=DraftState((KV,), 16))


def test_layouts_differ_if_only_one_node_splits_heads_between_ranks() -> None:
    split, whole = (KVLayout.of([PagedKV(4, 8, split=split)], 16, BF16) for split in (True, False))
    assert split.describe() != whole.describe()
    assert split.share(1, 2, range(1)).page_bytes * 2 == split.page_bytes
    assert whole.share(1, 2, range(1)) == whole

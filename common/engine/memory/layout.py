"""What lies where in a page. Nobody else knows what a page holds.

Layers that keep the same of as many tokens are a kind; a kind is cut into tables of some layers
each, and a page of a table is the envelope of these layers. All tables' pages are equally large, so
that there is one pool, one allocator and one transfer descriptor per page. In a page the head is
outermost, so that a tensor-parallel slice is one descriptor too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.memory.states import PagedKV
from common.page_tables import PageTables

MAX_PADDING = 0.05  # of what a request holds, at each of these lengths
TYPICAL_TOKENS = (2 << 10, 8 << 10, 32 << 10)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's KV is: in the pages of `table`, one of so many layers there."""

    state: PagedKV
    table: int
    index: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """places: by layer. dtype: of all keys and values."""

    page_size: int
    dtype: torch.dtype
    page_bytes: int
    windows: tuple[int | None, ...]  # by table, full ones first
    places: tuple[LayerPlace, ...]

    @classmethod
    def of(cls, layers: Sequence[PagedKV], page_size: int, dtype: torch.dtype) -> "KVLayout":
        """The layout for a model's layers: of the page sizes that waste little, the largest."""
        sizes = {state: _token_bytes(state, dtype) * page_size for state in layers}
        smallest = max(sizes.values())
        layouts = {
            page_bytes: cls._with(layers, page_size, dtype, page_bytes)
            for state in sizes
            for count in range(1, layers.count(state) + 1)
            if (page_bytes := sizes[state] * count) >= smallest
        }
        lean = [page_bytes for page_bytes in layouts if layouts[page_bytes].padding <= MAX_PADDING]
        best = max(lean) if lean else min(layouts, key=lambda size: layouts[size].padding)
        return layouts[best]

    @classmethod
    def _with(
        cls, layers: Sequence[PagedKV], page_size: int, dtype: torch.dtype, page_bytes: int
    ) -> "KVLayout":
        kinds = sorted(dict.fromkeys(layers), key=lambda state: state.window or 0)
        windows: list[int | None] = []
        places: dict[int, LayerPlace] = {}
        for kind in kinds:
            mine = [layer for layer, state in enumerate(layers) if state == kind]
            per_page = page_bytes // (_token_bytes(kind, dtype) * page_size)
            for first in range(0, len(mine), per_page):
                in_page = mine[first : first + per_page]
                for index, layer in enumerate(in_page):
                    places[layer] = LayerPlace(kind, len(windows), index, len(in_page))
                windows.append(kind.window)
        by_layer = tuple(places[layer] for layer in range(len(layers)))
        return cls(page_size, dtype, page_bytes, tuple(windows), by_layer)

    @property
    def tables(self) -> PageTables:
        return PageTables(self.page_size, self.windows)

    @property
    def token_bytes(self) -> int:
        """Of one token that all layers keep."""
        return sum(_token_bytes(place.state, self.dtype) for place in self.places)

    @property
    def padding(self) -> float:
        """Bytes that lie idle, for each that is used, at the worst of typical lengths."""
        return max(self._padding(num_tokens) for num_tokens in TYPICAL_TOKENS)

    def _padding(self, num_tokens: int) -> float:
        tables, num_pages = self.tables, self.tables.num_pages(num_tokens)
        used = sum(
            (num_pages - tables.live_from(place.table, num_tokens))
            * _token_bytes(place.state, self.dtype)
            * self.page_size
            for place in self.places
        )
        return tables.pages_for(num_tokens) * self.page_bytes / used - 1

    def describe(self) -> str:
        """What another node must lay out alike to read these pages."""
        tables: dict[int, str] = {}
        for place in self.places:
            state = place.state
            window = "" if state.window is None else f" of {state.window} tokens"
            tables[place.table] = (
                f"{place.num_layers} layers x {state.kv_heads} heads x {state.head_dim}{window}"
            )
        kinds = dict.fromkeys(tables.values())
        counts = [(list(tables.values()).count(kind), kind) for kind in kinds]
        described = ", ".join(f"{count} x ({kind})" for count, kind in counts)
        return f"head,layer,kv,token: {described}"

    def view(self, pages: Tensor, layer: int) -> Tensor:
        """A layer's keys and values in pages, uint8 [num_pages, page_bytes]: [num_pages, kv_heads,
        2, page_size, head_dim], K at index 0 of the third, V at 1."""
        place = self.places[layer]
        state = place.state
        part = self.page_size * state.head_dim
        numbers = pages.view(self.dtype)
        return numbers.as_strided(
            (len(pages), state.kv_heads, 2, self.page_size, state.head_dim),
            (
                self.page_bytes // self.dtype.itemsize,
                place.num_layers * 2 * part,
                part,
                state.head_dim,
                1,
            ),
            numbers.storage_offset() + place.index * 2 * part,
        )


def _token_bytes(state: PagedKV, dtype: torch.dtype) -> int:
    return 2 * state.kv_heads * state.head_dim * dtype.itemsize

"""What lies where in a page. Nobody else knows what a page holds.

Layers that keep the same of as many tokens are a kind; a kind is cut into tables of some layers
each, and a page of a table is the envelope of these layers. All tables' pages are equally large, so
that there is one pool, one allocator and one transfer descriptor per page. In a page the head is
outermost, so that a tensor-parallel slice is one descriptor too.

A drafter's layer lies behind the others, in the pages of the first table, whatever its shape is;
behind it its vector, one a page.

What layers keep of a request as a whole, its state, is cut into cells, one for each head and layer,
and these are packed into pages of the same pool: the head outermost again, no cell across an edge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import ConfigError
from common.page_tables import PageTables
from engine.kv_cache.states import Cells, DraftState, State
from kernels.linear_attention.state_cells import CellView

MAX_PADDING = 0.05  # of what a request holds, at each of these lengths
TYPICAL_TOKENS = (2 << 10, 8 << 10, 32 << 10)


ALIGNED = 64  # bytes

NO_TABLE = -1  # of a layer that keeps nothing of tokens


@dataclass(frozen=True, slots=True)
class CellPlace:
    """Where a layer's cells of one name are: with those of `num_layers` layers, from a state's page
    `first_page` on; head h's of layer l is number h * num_layers + l there."""

    cells: Cells
    first_page: int
    per_page: int
    index: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's KV is: in the pages of `table`, one of so many layers there; and its cells,
    in the pages of states."""

    state: State
    table: int
    index: int
    num_layers: int
    cells: tuple[CellPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """Where a drafter's layer and its vector begin in a page, in bytes."""

    state: DraftState
    layer: int
    vector: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftView:
    """tokens: as KVLayout.view, of one layer. vectors: [num_pages, 1, 2, 1, n / 2], as if they were
    the key and the value of a token that has the page to itself."""

    tokens: Tensor
    vectors: Tensor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """
    places: by layer.
    dtype: of all that is kept of tokens.
    cell_dtype: of cells that say nothing else, and of a drafter's vector.
    state_pages: of one request's state.
    draft: None: there is no drafter with a layer.
    """

    page_size: int
    dtype: torch.dtype
    cell_dtype: torch.dtype
    page_bytes: int
    windows: tuple[int | None, ...]  # by table, full ones first
    places: tuple[LayerPlace, ...]
    state_pages: int = 0
    draft: DraftPlace | None = None

    @classmethod
    def of(
        cls,
        layers: Sequence[State],
        page_size: int,
        dtype: torch.dtype,
        kept_in: torch.dtype | None = None,
        draft: DraftState | None = None,
    ) -> "KVLayout":
        """The layout for a model's layers: of the page sizes that waste little, the largest.

        Args:
            dtype: that the model computes in.
            kept_in: of what is kept of tokens; None: the same.
        Raises:
            ConfigError: no layer keeps keys and values, or a cell is larger than a page; or there
                is a drafter, and no layer sees all tokens.
        """
        sizes = {
            state: _token_bytes(state, kept_in or dtype) * page_size
            for state in layers
            if state.token_numbers
        }
        if not sizes:
            raise ConfigError("a model none of whose layers keeps keys and values is not served")
        smallest = max(sizes.values())
        layouts = {
            page_bytes: cls._with(layers, page_size, kept_in or dtype, dtype, page_bytes)
            for state in sizes
            for count in range(1, layers.count(state) + 1)
            if (page_bytes := sizes[state] * count) >= smallest
        }
        lean = [page_bytes for page_bytes in layouts if layouts[page_bytes].padding <= MAX_PADDING]
        best = max(lean) if lean else min(layouts, key=lambda size: layouts[size].padding)
        return layouts[best]._and_draft(draft)._and_cells(layers)

    @classmethod
    def _with(
        cls,
        layers: Sequence[State],
        page_size: int,
        dtype: torch.dtype,
        cell_dtype: torch.dtype,
        page_bytes: int,
    ) -> "KVLayout":
        of_tokens = (state for state in layers if state.token_numbers)
        kinds = sorted(dict.fromkeys(of_tokens), key=lambda state: state.window or 0)
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
        by_layer = tuple(
            places.get(layer, LayerPlace(state, NO_TABLE, 0, 0))
            for layer, state in enumerate(layers)
        )
        return cls(page_size, dtype, cell_dtype, page_bytes, tuple(windows), by_layer)

    def _and_draft(self, draft: DraftState | None) -> "KVLayout":
        if draft is None:
            return self
        if self.windows[0] is not None:
            raise ConfigError("a drafter with a layer is not for models that see windows alone")
        layer = _aligned(self.page_bytes)
        of_tokens = _token_bytes(draft.layer, self.dtype) * self.page_size
        vector = _aligned(layer + of_tokens)
        page_bytes = _aligned(vector + draft.vector * self.cell_dtype.itemsize)
        return replace(self, page_bytes=page_bytes, draft=DraftPlace(draft, layer, vector))

    def _and_cells(self, layers: Sequence[State]) -> "KVLayout":
        cells, state_pages = _cell_places(layers, self.page_size, self.cell_dtype, self.page_bytes)
        places = tuple(
            replace(place, cells=mine) for place, mine in zip(self.places, cells, strict=True)
        )
        return replace(self, places=places, state_pages=state_pages)

    @property
    def tables(self) -> PageTables:
        return PageTables(self.page_size, self.windows, self.state_pages)

    @property
    def token_bytes(self) -> int:
        """Of one token that all layers keep."""
        layers = [place.state for place in self.places]
        if self.draft is not None:
            layers.append(self.draft.state.layer)
        return sum(_token_bytes(layer, self.dtype) for layer in layers)

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
            if place.table != NO_TABLE
        )
        num_pages = tables.pages_for(num_tokens) - self.state_pages
        return num_pages * self.page_bytes / used - 1

    def describe(self) -> str:
        """What another node must lay out alike to read these pages."""
        tables: dict[int, str] = {}
        states: dict[str, None] = {}
        for place in self.places:
            window = "" if place.state.window is None else f" of {place.state.window} tokens"
            if place.table != NO_TABLE:
                tables[place.table] = f"{place.num_layers} layers x {place.state.words}{window}"
            states |= dict.fromkeys(_described(each, self.cell_dtype) for each in place.cells)
        kinds = dict.fromkeys(tables.values())
        counts = [(list(tables.values()).count(kind), kind) for kind in kinds]
        described = ", ".join(f"{count} x ({kind})" for count, kind in counts)
        described = f"head,layer,kv,token: {described}"
        if self.draft is not None:
            described = f"{described}; drafter: {self.draft.state.words}"
        return f"{described}; head,layer: {', '.join(states)}" if states else described

    def view(self, pages: Tensor, layer: int) -> Tensor:
        """What a layer keeps of tokens, in pages, uint8 [num_pages, page_bytes]: [num_pages, heads,
        vectors, page_size, size]. Of keys and values K is the first vector, V the second. No heads
        where it keeps nothing."""
        place = self.places[layer]
        return self._of_tokens(pages, place.state, place.index, place.num_layers)

    def draft_view(self, pages: Tensor) -> DraftView | None:
        """What a drafter keeps in such pages; None: there is none."""
        place = self.draft
        if place is None:
            return None
        tokens = self._of_tokens(pages[:, place.layer :], place.state.layer, 0, 1)
        vectors = pages[:, place.vector :].view(self.cell_dtype)[:, : place.state.vector]
        return DraftView(tokens, vectors.view(len(pages), 1, 2, 1, place.state.vector // 2))

    def _of_tokens(self, pages: Tensor, state: State, index: int, num_layers: int) -> Tensor:
        """Of one of so many layers that begin where `pages` do."""
        heads, vectors, size = state.shape
        part = self.page_size * size
        numbers = pages.view(self.dtype)
        return numbers.as_strided(
            (len(pages), heads, vectors, self.page_size, size),
            (self.page_bytes // self.dtype.itemsize, num_layers * vectors * part, part, size, 1),
            numbers.storage_offset() + index * vectors * part,
        )

    def cells(self, pages: Tensor, layer: int) -> dict[str, CellView]:
        """A layer's cells in pages, uint8 [num_pages, page_bytes], by name."""
        return {
            place.cells.name: self._cell_view(pages, place) for place in self.places[layer].cells
        }

    def _cell_view(self, pages: Tensor, place: CellPlace) -> CellView:
        dtype, shape = place.cells.dtype or self.cell_dtype, place.cells.shape
        numbers = pages.view(dtype)
        size = math.prod(shape)
        inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        view = numbers.as_strided(
            (len(pages), place.per_page, *shape),
            (self.page_bytes // dtype.itemsize, size, *inner),
            numbers.storage_offset(),
        )
        return CellView(view, place.first_page, place.index, place.num_layers, place.cells.count)


def _cell_places(
    layers: Sequence[State], page_size: int, dtype: torch.dtype, page_bytes: int
) -> tuple[list[tuple[CellPlace, ...]], int]:
    """Of each layer, and how many pages a state takes."""
    places: list[list[CellPlace]] = [[] for _ in layers]
    state_pages = 0
    for cells in dict.fromkeys(each for state in layers for each in state.cells):
        mine = [layer for layer, state in enumerate(layers) if cells in state.cells]
        num_bytes = cells.num_bytes(dtype)
        per_page = page_bytes // num_bytes
        if not per_page or page_bytes % (cells.dtype or dtype).itemsize:
            enough = page_size
            while enough * page_bytes < num_bytes * page_size:
                enough *= 2
            raise ConfigError(
                f"engine.cache.page_size: {page_size} tokens make pages of {page_bytes} bytes, and "
                f"{cells.name} of one head takes {num_bytes}; {enough} are enough"
            )
        for index, layer in enumerate(mine):
            places[layer].append(CellPlace(cells, state_pages, per_page, index, len(mine)))
        state_pages += -(-cells.count * len(mine) // per_page)
    return [tuple(each) for each in places], state_pages


def _described(place: CellPlace, dtype: torch.dtype) -> str:
    cells = place.cells
    shape = " x ".join(str(size) for size in cells.shape)
    kind = str(cells.dtype or dtype).removeprefix("torch.")
    return f"{place.num_layers} layers x {cells.count} x {cells.name} ({shape} {kind})"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def _token_bytes(state: State, dtype: torch.dtype) -> int:
    return state.token_numbers * dtype.itemsize

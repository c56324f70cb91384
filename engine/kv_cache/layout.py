"""The layout of a page. Only this module knows the contents of a page.

Layers that keep the same data for the same tokens form a kind. Each kind is divided into page
tables, and a page of a table contains the KV of that table's layers. Pages of all tables have the
same size, so that there is one pool, one allocator and one transfer descriptor per page. The head
is the outermost dimension of a page, so that the part of a tensor-parallel rank is one descriptor,
too.

The layers of a drafter come after the others in the pages of the first table. Drafter layers of
equal shape are stored together, with the head outermost. The drafter's vector, one per page,
follows them.

The recurrent state of a request does not grow with its tokens. It is divided into cells, one per
head and layer. Cells are packed into pages of the same pool, with the head outermost. No cell
crosses a page boundary.

Tables are chosen once, for the whole model. Each rank keeps these tables, so that a page number
means the same on all ranks, but packs its own heads and layers into them. The page size in bytes
and the number of state pages may therefore differ between ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from common.copy_map import ONE_RANK, Atom, AtomKey, NodeShape, RankPages
from common.errors import ConfigError, LayoutMismatch
from common.limits import MAX_RANKS
from common.page_tables import PageTables
from engine.kv_cache.states import DraftState, LayerState, StateCells
from engine.ranks import stage_layers
from kernels.linear_attention.state_cells import CellView

MAX_PADDING = 0.05  # maximum share of padding in a request's pages at each of these lengths
TYPICAL_TOKENS = (2 << 10, 8 << 10, 32 << 10)


ALIGNED = 64  # bytes

NO_TABLE = -1  # for layers that keep no KV per token
DRAFT_TABLE = 0  # the table whose pages contain a drafter's layers


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The location of a layer's cells of one name, packed with those of `num_layers` layers.

    They begin at page `first_page` of the state. Head h of layer l is cell h * num_layers + l.
    """

    cells: StateCells
    first_page: int
    per_page: int
    index: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The location of a layer's KV: in the pages of `table`, as layer `index` of `num_layers`.
    `cells`: locations of its cells in the state pages."""

    state: LayerState
    table: int
    index: int
    num_layers: int
    cells: tuple[CellPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftLayerPlace:
    """The location of a drafter's layer in a page: layer `index` of `num_layers` of equal shape,
    which begin at byte `offset`."""

    offset: int
    index: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The locations of a drafter's layers in a page, and the offset of its vector in bytes."""

    state: DraftState
    layers: tuple[DraftLayerPlace, ...]
    vector: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DraftView:
    """Views of a drafter's data.

    layers: one view per layer, see KVLayout.view. vectors: [num_pages, 1, 2, 1, n / 2], shaped like
    the key and the value of one token per page.
    """

    layers: tuple[Tensor, ...]
    vectors: Tensor

    @property
    def tables(self) -> tuple[int, ...]:
        """The page table of each layer."""
        return (DRAFT_TABLE,) * len(self.layers)

    @property
    def cells(self) -> tuple[Mapping[str, CellView], ...]:
        """The state cells of each layer: none."""
        return ({},) * len(self.layers)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of pages for one model.

    Attributes:
        places: location of each layer.
        dtype: dtype of data kept per token.
        cell_dtype: dtype of cells without their own, and of a drafter's vector.
        state_pages: pages of one request's recurrent state.
        draft: None: there is no drafter with layers.
    """

    page_size: int
    dtype: torch.dtype
    cell_dtype: torch.dtype
    page_bytes: int
    windows: tuple[int | None, ...]  # by table, full attention first
    places: tuple[LayerPlace, ...]
    state_pages: int = 0
    draft: DraftPlace | None = None

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerState],
        page_size: int,
        dtype: torch.dtype,
        kept_in: torch.dtype | None = None,
        draft: DraftState | None = None,
    ) -> "KVLayout":
        """Create the layout of a model's layers, with the largest page size that wastes little
        memory.

        Args:
            dtype: dtype in which the model computes.
            kept_in: dtype of data kept per token. None: the same.
        Raises:
            ConfigError: no layer keeps keys and values, or a cell is larger than a page. Or there
                is a drafter, and no layer has full attention.
        """

        def paged(page_size: int) -> "KVLayout":
            return cls._paged(layers, page_size, kept_in or dtype, dtype, draft)

        return paged(page_size)._and_cells(paged)

    @classmethod
    def _paged(
        cls,
        layers: Sequence[LayerState],
        page_size: int,
        dtype: torch.dtype,
        cell_dtype: torch.dtype,
        draft: DraftState | None,
    ) -> "KVLayout":
        """Return the layout without cells."""
        sizes = {
            state: _token_bytes(state, dtype) * page_size for state in layers if state.token_numbers
        }
        if not sizes:
            raise ConfigError("a model without layers that keep keys and values is not supported")
        smallest = max(sizes.values())
        layouts = {
            page_bytes: cls._with(layers, page_size, dtype, cell_dtype, page_bytes)
            for state in sizes
            for count in range(1, layers.count(state) + 1)
            if (page_bytes := sizes[state] * count) >= smallest
        }
        lean = [page_bytes for page_bytes in layouts if layouts[page_bytes].padding <= MAX_PADDING]
        best = max(lean) if lean else min(layouts, key=lambda size: layouts[size].padding)
        return layouts[best]._and_draft(draft)

    @classmethod
    def _with(
        cls,
        layers: Sequence[LayerState],
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
            raise ConfigError(
                "a drafter with layers is not supported for models with only sliding windows"
            )
        places, end = list[DraftLayerPlace](), _aligned(self.page_bytes)
        for _, equal in groupby(draft.layers, lambda layer: layer.shape):
            layers = list(equal)
            count = len(layers)
            places += (DraftLayerPlace(end, index, count) for index in range(count))
            end = _aligned(end + count * _token_bytes(layers[0], self.dtype) * self.page_size)
        page_bytes = _aligned(end + draft.vector * self.cell_dtype.itemsize)
        return replace(self, page_bytes=page_bytes, draft=DraftPlace(draft, tuple(places), end))

    def _and_cells(self, paged: Callable[[int], "KVLayout"]) -> "KVLayout":
        """Pack the cells of the layers into pages. `paged`: returns such a layout for another page
        size, for the error."""
        packed: dict[StateCells, list[int]] = {}  # layers by the cells that they keep
        for layer, place in enumerate(self.places):
            for cells in place.state.cells:
                packed.setdefault(cells, []).append(layer)
        if large := [cells for cells in packed if not self._has_room(cells)]:
            enough = 2 * self.page_size
            while not all(map(paged(enough)._has_room, large)):
                enough *= 2
            raise ConfigError(
                f"engine.cache.page_size: {self.page_size} tokens make pages of {self.page_bytes} "
                f"bytes, and {large[0].name} of one head takes "
                f"{large[0].num_bytes(self.cell_dtype)}; {enough} are enough"
            )
        places = [list(place.cells) for place in self.places]
        state_pages = 0
        for cells, layers in packed.items():
            per_page = self.page_bytes // cells.num_bytes(self.cell_dtype)
            for index, layer in enumerate(layers):
                places[layer].append(CellPlace(cells, state_pages, per_page, index, len(layers)))
            state_pages += -(-cells.count * len(layers) // per_page)
        by_layer = zip(self.places, places, strict=True)
        return replace(
            self,
            places=tuple(replace(place, cells=tuple(cells)) for place, cells in by_layer),
            state_pages=state_pages,
        )

    def _has_room(self, cells: StateCells) -> bool:
        """Return whether a page has room for an aligned cell of this kind."""
        dtype = cells.dtype or self.cell_dtype
        return cells.num_bytes(dtype) <= self.page_bytes and not self.page_bytes % dtype.itemsize

    def share(self, place: int, tp: int, layers: range) -> "KVLayout":
        """Return the layout of one rank. It has the layers of its pipeline stage. The last stage
        has the drafter.

        Args:
            place: number of the rank among the `tp` tensor-parallel ranks of its stage.
        Raises:
            ConfigError: this number of ranks cannot serve the model. The error has the numbers.
        """
        if not (0 <= place < tp <= MAX_RANKS):
            raise ConfigError(f"no rank {place} of {tp}: a node has at most {MAX_RANKS} ranks")
        whole = range(len(self.places))
        if not (layers.step == 1 and whole.start <= layers.start < layers.stop <= whole.stop):
            raise ConfigError(f"no stage of {layers}: the model has {len(whole)} layers")
        if all(self.places[layer].table == NO_TABLE for layer in layers):
            raise ConfigError(
                f"no layer from {layers.start} to {layers.stop - 1} keeps keys and values: a stage "
                f"needs at least one"
            )
        return self._part(place, tp, layers)._and_cells(
            lambda page_size: self._paged(
                [each.state for each in self.places],
                page_size,
                self.dtype,
                self.cell_dtype,
                self.draft.state if self.draft else None,
            )._part(place, tp, layers)
        )

    def _part(self, place: int, tp: int, layers: range) -> "KVLayout":
        """Return a rank's layout without cells."""
        tables = [self.places[layer].table for layer in layers]
        num_bytes = [0] * len(self.windows)
        places = []
        for number, layer in enumerate(layers):
            state, table = self.places[layer].state.share(place, tp), tables[number]
            if table == NO_TABLE:
                places.append(LayerPlace(state, NO_TABLE, 0, 0))
                continue
            index, num_layers = tables[:number].count(table), tables.count(table)
            places.append(LayerPlace(state, table, index, num_layers))
            num_bytes[table] += _token_bytes(state, self.dtype) * self.page_size
        part = replace(self, page_bytes=max(num_bytes), places=tuple(places), draft=None)
        if self.draft is None or layers.stop < len(self.places):
            return part
        return part._and_draft(self.draft.state.share(place, tp))

    def rank_pages(self, place: int, tp: int, layers: range) -> RankPages:
        """Return the content of the pages of one rank. Arguments and errors are as in `share`. Call
        it on the layout of the whole model."""
        part = self.share(place, tp, layers)
        atoms: list[dict[AtomKey, Atom]] = [{} for _ in range(len(self.windows) + 1)]
        for layer, its in zip(layers, part.places, strict=True):
            whole = self.places[layer].state
            if its.table != NO_TABLE:
                heads, size = whole.own(place, tp), part._head_bytes(its.state)
                for number, head in enumerate(heads):
                    at = (number * its.num_layers + its.index) * size
                    atoms[its.table][AtomKey("tokens", layer, head)] = Atom(0, at, size)
            counted = {cells.name: cells for cells in whole.cells}
            for own in its.cells:
                name, size = own.cells.name, own.cells.num_bytes(self.cell_dtype)
                for number, head in enumerate(counted[name].own(place, tp)):
                    page, nth = divmod(number * own.num_layers + own.index, own.per_page)
                    atom = Atom(own.first_page + page, nth * size, size)
                    atoms[-1][AtomKey(name, layer, head)] = atom
        if self.draft is not None and part.draft is not None:
            atoms[DRAFT_TABLE].update(self._draft_atoms(self.draft, part.draft, place, tp))
        return RankPages(part.page_bytes, part.state_pages, layers, tuple(atoms))

    def _draft_atoms(
        self, whole: DraftPlace, own: DraftPlace, place: int, tp: int
    ) -> Iterator[tuple[AtomKey, Atom]]:
        """Yield the parts of a drafter's data that one rank keeps. The numbers of its layers follow
        those of the model."""
        states = zip(whole.state.layers, own.state.layers, own.layers, strict=True)
        for layer, (state, part, its) in enumerate(states, len(self.places)):
            size = self._head_bytes(part)
            for number, head in enumerate(state.own(place, tp)):
                at = its.offset + (number * its.num_layers + its.index) * size
                yield AtomKey("tokens", layer, head), Atom(0, at, size)
        if size := own.state.vector * self.cell_dtype.itemsize:
            yield AtomKey("vector", len(self.places), 0), Atom(0, own.vector, size)

    def by_stage(self, shape: NodeShape) -> tuple["KVLayout", ...]:
        """Return the layout of one rank per stage, which is the same for all ranks of a stage. Call
        it on the layout of the whole model.

        Raises:
            ConfigError: a node with this shape cannot serve the model.
        """
        if shape == ONE_RANK:
            return (self,)
        (tp, pp), num_layers = shape, len(self.places)
        parts = tuple(self.share(0, tp, stage_layers(num_layers, each, pp)) for each in range(pp))
        # Page ids are the same in all stages, so a stage may have state pages that it does not use.
        most = max(part.state_pages for part in parts)
        return tuple(replace(part, state_pages=most) for part in parts)

    def pages_by_rank(self, shape: NodeShape) -> tuple[RankPages, ...]:
        """Return the content of the pages of all ranks of a node. Call it on the layout of the
        whole model.

        Raises:
            LayoutMismatch: the model has no node with this shape.
        """
        tp, pp = shape
        try:
            state_pages = self.by_stage(shape)[0].state_pages
            return tuple(
                replace(
                    self.rank_pages(rank, tp, stage_layers(len(self.places), stage, pp)),
                    state_pages=state_pages,
                )
                for stage in range(pp)
                for rank in range(tp)
            )
        except ConfigError as error:
            raise LayoutMismatch(f"a node with tp {tp} and pp {pp}: {error}") from error

    def _head_bytes(self, state: LayerState) -> int:
        """Return the bytes of one head of a layer in a page."""
        return _token_bytes(state, self.dtype) * self.page_size // state.shape[0]

    @property
    def tables(self) -> PageTables:
        return PageTables(self.page_size, self.windows, self.state_pages)

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all layers."""
        layers = [place.state for place in self.places]
        if self.draft is not None:
            layers.extend(self.draft.state.layers)
        return sum(_token_bytes(layer, self.dtype) for layer in layers)

    @property
    def padding(self) -> float:
        """Unused bytes per used byte, for the worst of the typical lengths."""
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
        """Return a text that must be equal on two nodes that exchange pages."""
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
        """Return the KV of a layer in pages, as a view [num_pages, heads, vectors, page_size,
        size]. Vector 0 has keys, vector 1 has values. The view has no heads if the layer keeps
        nothing per token.

        Args:
            pages: uint8 [num_pages, page_bytes].
        """
        place = self.places[layer]
        return self._of_tokens(pages, place.state, place.index, place.num_layers)

    def draft_view(self, pages: Tensor) -> DraftView | None:
        """Return a drafter's part of such pages, or None if there is no drafter."""
        place = self.draft
        if place is None:
            return None
        layers = zip(place.layers, place.state.layers, strict=True)
        tokens = (
            self._of_tokens(pages[:, its.offset :], state, its.index, its.num_layers)
            for its, state in layers
        )
        vectors = pages[:, place.vector :].view(self.cell_dtype)[:, : place.state.vector]
        each = len(pages), 1, 2, 1, place.state.vector // 2
        return DraftView(tuple(tokens), vectors.view(each))

    def _of_tokens(self, pages: Tensor, state: LayerState, index: int, num_layers: int) -> Tensor:
        """Return the view of layer `index` of `num_layers` layers. The first one begins at
        `pages`."""
        heads, vectors, size = state.shape
        part = self.page_size * size
        numbers = pages.view(self.dtype)
        return numbers.as_strided(
            (len(pages), heads, vectors, self.page_size, size),
            (self.page_bytes // self.dtype.itemsize, num_layers * vectors * part, part, size, 1),
            numbers.storage_offset() + index * vectors * part,
        )

    def cells(self, pages: Tensor, layer: int) -> dict[str, CellView]:
        """Return a layer's state cells in pages, uint8 [num_pages, page_bytes], by name."""
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


def _described(place: CellPlace, dtype: torch.dtype) -> str:
    cells = place.cells
    shape = " x ".join(str(size) for size in cells.shape)
    kind = str(cells.dtype or dtype).removeprefix("torch.")
    return f"{place.num_layers} layers x {cells.count} x {cells.name} ({shape} {kind})"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def _token_bytes(state: LayerState, dtype: torch.dtype) -> int:
    return state.token_numbers * dtype.itemsize

"""The KV that a model keeps of a request, in pages as `engine.kv_cache.layout` lays them out."""

import msgspec

from common.page_tables import PageTables

_MAX_PADDING = 0.05  # share of unused bytes in the pages of a request, at each of these lengths
_TYPICAL_TOKENS = (2 << 10, 8 << 10, 32 << 10)


class KvShape(msgspec.Struct, frozen=True):
    """The KV of a request.

    Attributes:
        layer_bytes: of a token in one layer, with the heads of all ranks.
        full: layers that keep the KV of all tokens.
        windowed: layers that keep that of a window.
        window: tokens of the window.
        state_bytes: of the state of all other layers.
    """

    layer_bytes: int
    full: int
    windowed: int = 0
    window: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in all layers, if it is inside the window."""
        return self.layer_bytes * (self.full + self.windowed)

    @property
    def is_uniform(self) -> bool:
        """Return whether each token of a request takes the same memory."""
        return not (self.windowed or self.state_bytes)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page."""
        return self._layers_per_page(page_size) * self.layer_bytes * page_size

    def tables(self, page_size: int) -> PageTables:
        """Return the page tables of a request."""
        tables = self._tables(page_size, self._layers_per_page(page_size))
        state_pages = -(-self.state_bytes // self.page_bytes(page_size))
        return PageTables(page_size, tables.windows, state_pages)

    def _layers_per_page(self, page_size: int) -> int:
        """Return the layers of the largest page that wastes little memory."""
        if not self.windowed:
            return self.full
        counts = range(1, max(self.full, self.windowed) + 1)
        padding = {count: self._padding(page_size, count) for count in counts}
        lean = [count for count in counts if padding[count] <= _MAX_PADDING]
        return max(lean) if lean else min(counts, key=lambda count: padding[count])

    def _tables(self, page_size: int, layers_per_page: int) -> PageTables:
        full = (None,) * -(-self.full // layers_per_page)
        return PageTables(page_size, full + (self.window,) * -(-self.windowed // layers_per_page))

    def _padding(self, page_size: int, layers_per_page: int) -> float:
        """Return the unused bytes per used byte, at the worst of the typical lengths."""
        tables = self._tables(page_size, layers_per_page)
        return (
            max(
                layers_per_page
                * tables.pages_for(num_tokens)
                / self._layer_pages(tables, num_tokens)
                for num_tokens in _TYPICAL_TOKENS
            )
            - 1
        )

    def _layer_pages(self, tables: PageTables, num_tokens: int) -> int:
        num_pages = tables.num_pages(num_tokens)
        live = num_pages - tables.live_from(tables.num_tables - 1, num_tokens)
        return self.full * num_pages + self.windowed * live

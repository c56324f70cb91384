"""Pages loaded back into the prefix tree, until a request uses them or the tree evicts them. Only
used pages count as saved computation."""

from collections.abc import Iterable, Mapping

from engine.kv_cache.page_keys import PageKey


class TierLoads:
    """Loaded pages that no request has used yet. Engine thread only.

    Attributes:
        used_pages: pages of tokens, since the start. Key: whether only a file had them.
    """

    def __init__(self) -> None:
        self.used_pages = {False: 0, True: 0}
        self._unused: dict[PageKey, bool] = {}

    def __bool__(self) -> bool:
        """Return whether there are unused pages."""
        return bool(self._unused)

    def add(self, pages: Mapping[PageKey, bool]) -> None:
        """Add pages that are now in the tree. Values: whether only a file had the page."""
        self._unused.update(pages)

    def used(self, keys: Iterable[PageKey]) -> None:
        """Note that a request continues from these pages. Each page counts once."""
        for key in keys:
            filed = self._unused.pop(key, None)
            if filed is not None:
                self.used_pages[filed] += 1

    def left(self, keys: Iterable[PageKey]) -> None:
        """Note that the tree has evicted these."""
        for key in keys:
            self._unused.pop(key, None)

    def clear(self) -> None:
        self._unused.clear()

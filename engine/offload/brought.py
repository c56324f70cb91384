"""What has been brought back to the prefix tree, until somebody has use for it or the tree forgets
it: only what was used need not be computed."""

from collections.abc import Iterable, Mapping

from engine.kv_cache.page_keys import PageKey


class Brought:
    """Engine thread only.

    Attributes:
        used_pages: of tokens, since the start, by whether a file alone had them.
    """

    def __init__(self) -> None:
        self.used_pages = {False: 0, True: 0}
        self._unused: dict[PageKey, bool] = {}

    def __bool__(self) -> bool:
        """Whether there is anything that nobody has used."""
        return bool(self._unused)

    def add(self, pages: Mapping[PageKey, bool]) -> None:
        """The tree has these; by whether a file alone had them."""
        self._unused.update(pages)

    def used(self, keys: Iterable[PageKey]) -> None:
        """Somebody goes on from these: each counts once."""
        for key in keys:
            filed = self._unused.pop(key, None)
            if filed is not None:
                self.used_pages[filed] += 1

    def left(self, keys: Iterable[PageKey]) -> None:
        """The tree has forgotten these."""
        for key in keys:
            self._unused.pop(key, None)

    def clear(self) -> None:
        self._unused.clear()

"""Which process of its router this one is, and where each of them is asked.

They meet at sockets in a directory that only their user can open: whoever gets there is one of
them, and is not asked for anything else. Knows nothing of what is asked.
"""

import os
import time

import msgspec


class Place(msgspec.Struct, frozen=True):
    """
    Attributes:
        number: of this process, from 0; `of` is that of the one that keeps them all.
        of: how many serve.
        directory: of the sockets; empty where one process is the whole router.
        began: when the router did, by the clock of time.monotonic(), which is one for a host.
        again: whether this process follows one that has ended.
    """

    number: int
    of: int
    directory: str
    began: float
    again: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether there are others."""
        return self.of > 1

    @property
    def socket(self) -> str:
        """Where this process is asked."""
        return self._socket(self.number)

    @property
    def others(self) -> dict[int, str]:
        """Where each other process that serves is asked, by its number."""
        if not self.is_shared:
            return {}
        return {number: self._socket(number) for number in range(self.of) if number != self.number}

    @property
    def keeper(self) -> dict[int, str]:
        """The same of the one that keeps them."""
        return {self.of: self._socket(self.of)} if self.is_shared else {}

    def _socket(self, number: int) -> str:
        return os.path.join(self.directory, f"{number}.sock")


def alone() -> Place:
    """Of the one process of a router."""
    return Place(0, 1, "", time.monotonic())

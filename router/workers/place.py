"""Position of this process in its router, and the sockets of all processes.

The sockets are in a directory that only their user can open. Access to it is the only
authentication.
"""

import os
import time

import msgspec


class ProcessSlot(msgspec.Struct, frozen=True):
    """Position of one process in its router.

    Attributes:
        number: of this process, from 0. The keeper has the number `of`.
        of: number of serving processes.
        directory: of the sockets. Empty for a router with one process.
        began: start of the router, by time.monotonic(), which all processes of a host share.
        again: whether this process replaces one that has ended.
    """

    number: int
    of: int
    directory: str
    began: float
    again: bool = False

    @property
    def is_shared(self) -> bool:
        """True if there are several processes."""
        return self.of > 1

    @property
    def socket(self) -> str:
        """Socket of this process."""
        return self._socket(self.number)

    @property
    def others(self) -> dict[int, str]:
        """Sockets of the other serving processes, by number."""
        if not self.is_shared:
            return {}
        return {number: self._socket(number) for number in range(self.of) if number != self.number}

    @property
    def keeper(self) -> dict[int, str]:
        """Socket of the keeper, by its number."""
        return {self.of: self._socket(self.of)} if self.is_shared else {}

    def _socket(self, number: int) -> str:
        return os.path.join(self.directory, f"{number}.sock")


def alone() -> ProcessSlot:
    """Return the position of the only process of a router."""
    return ProcessSlot(0, 1, "", time.monotonic())

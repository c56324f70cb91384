"""Waits for descriptors with poll(2). select(2) fails for numbers above 1023, which nodes with many
connections, ranks or links reach.
"""

import select
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

_ALWAYS = select.POLLHUP | select.POLLERR | select.POLLNVAL  # reported without a request


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_Source = TypeVar("_Source", bound=int | _HasFileno)


class PollSet(Generic[_Source]):
    """Sources that are waited for repeatedly. A source that has ended or failed counts as ready, so
    that the next call on it reports this.
    """

    def __init__(self, readable: Sequence[_Source]) -> None:
        self._poll = select.poll()
        self._readable = {_descriptor(each): each for each in readable}
        for descriptor in self._readable:
            self._poll.register(descriptor, select.POLLIN)

    def wait(
        self, writable: Sequence[_Source] = (), *, seconds: float
    ) -> tuple[Sequence[_Source], Sequence[_Source]]:
        """Wait until one of the sources is readable, or one of `writable` is writable.

        Returns:
            The readable and the writable sources. Both are empty after `seconds`.
        """
        others = {_descriptor(each): each for each in writable}
        for descriptor in others:
            also = select.POLLIN if descriptor in self._readable else 0
            self._poll.register(descriptor, select.POLLOUT | also)
        found = self._poll.poll(1000.0 * seconds)
        for descriptor in others:
            if descriptor in self._readable:
                self._poll.register(descriptor, select.POLLIN)
            else:
                self._poll.unregister(descriptor)
        return (
            _among(self._readable, found, select.POLLIN),
            _among(others, found, select.POLLOUT),
        )


def poll_ready(
    readable: Sequence[_Source], writable: Sequence[_Source] = (), *, seconds: float
) -> tuple[Sequence[_Source], Sequence[_Source]]:
    """Wait once, like PollSet.wait."""
    return PollSet(readable).wait(writable, seconds=seconds)


def _among(
    sources: dict[int, _Source], found: Sequence[tuple[int, int]], event: int
) -> Sequence[_Source]:
    wanted = event | _ALWAYS
    return [sources[each] for each, events in found if events & wanted and each in sources]


def _descriptor(source: int | _HasFileno) -> int:
    return source if isinstance(source, int) else source.fileno()

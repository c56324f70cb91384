"""Waits for descriptors by poll(2). select(2) fails for numbers above 1023, which a node with many
connections, ranks or links has.
"""

import select
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

_ALWAYS = select.POLLHUP | select.POLLERR | select.POLLNVAL  # reported without a request


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_Source = TypeVar("_Source", bound=int | _HasFileno)


def poll_ready(
    readable: Sequence[_Source], writable: Sequence[_Source] = (), *, seconds: float
) -> tuple[Sequence[_Source], Sequence[_Source]]:
    """Wait until one of the sources is ready. A source that has ended or failed is ready, so that
    the next call on it reports this.

    Returns:
        The readable ones and the writable ones. Both are empty after so many seconds.
    """
    wanted: dict[int, int] = {}
    for sources, event in ((readable, select.POLLIN), (writable, select.POLLOUT)):
        for each in map(_descriptor, sources):
            wanted[each] = wanted.get(each, 0) | event
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    found = dict(poll.poll(1000.0 * seconds))

    def among(sources: Iterable[_Source], event: int) -> Sequence[_Source]:
        return [each for each in sources if found.get(_descriptor(each), 0) & (event | _ALWAYS)]

    return among(readable, select.POLLIN), among(writable, select.POLLOUT)


def _descriptor(source: int | _HasFileno) -> int:
    return source if isinstance(source, int) else source.fileno()

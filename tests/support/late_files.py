"""Pages in real files without threads: what is asked for is done as late as a test wants, or at
once and told late."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from common.requests.namespace import Namespace
from engine.offload.page_files import FileFault, PageFiles, SlotRead, SlotWrite


class LateFuture(Future[list[FileFault | None]]):
    def __init__(self, work: Callable[[], None], left: int) -> None:
        super().__init__()
        self._work = work
        self._left = left  # times that somebody asks in vain

    def done(self) -> bool:
        if self._left:
            self._left -= 1
            return False
        self._work()
        return super().done()


@dataclass(eq=False)
class LateFiles:
    """
    on_host: whose each host page is.
    whose: each slot is.
    delays: of the next reads and writes, in polls; after that none.
    """

    files: PageFiles
    on_host: dict[int, Namespace | None]
    whose: dict[int, Namespace | None] = field(default_factory=dict)
    delays: deque[int] = field(default_factory=deque)
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._in_order: deque[Callable[[], None]] = deque()  # writes that are not done yet

    def write(self, writes: Sequence[SlotWrite]) -> LateFuture:
        def work() -> None:
            self.whose |= {each.slot: self.on_host.get(each.host_page) for each in writes}
            future.set_result(self.files.write(writes))

        future = self._future(lambda: self._catch_up(future))
        self._in_order.append(work)
        if self.num_calls % 3 == 0:
            self._catch_up(future)
        return future

    def read(self, reads: Sequence[SlotRead]) -> LateFuture:
        def work() -> None:
            if not Future.done(future):
                self.on_host |= {each.host_page: self.whose.get(each.slot) for each in reads}
                future.set_result(self.files.read(reads))

        future = self._future(work)
        if self.num_calls % 3 == 0:
            work()
        return future

    def erase(self, slots: Sequence[int]) -> None:
        self._in_order.append(lambda: self.files.erase(slots))

    def clear(self) -> None:
        self._in_order.append(self.files.clear)

    def close(self) -> None:
        while self._in_order:
            self._in_order.popleft()()
        self.files.close()

    def _future(self, work: Callable[[], None]) -> LateFuture:
        self.num_calls += 1
        return LateFuture(work, self.delays.popleft() if self.delays else 0)

    def _catch_up(self, future: LateFuture) -> None:
        """With all that was to be written before."""
        while not Future.done(future):
            self._in_order.popleft()()

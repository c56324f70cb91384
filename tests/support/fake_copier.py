"""Copies between the fake runner's pages and its host pages: as late as a test wants, and some of
them done at once, however late they are told."""

from collections import deque
from dataclasses import dataclass, field

from common.requests.namespace import Namespace
from engine.batch.batch import PageCopies
from tests.support.fake_runner import FakeRunner


@dataclass(eq=False)
class FakeCopy:
    copier: "FakeCopier"
    copies: PageCopies
    brings: bool
    left: int  # times that somebody asks in vain
    moved: bool = False

    @property
    def done(self) -> bool:
        if self.left:
            self.left -= 1
            return False
        self.move()
        return True

    def move(self) -> None:
        if not self.moved:
            self.moved = True
            self.copier.move(self.copies, brings=self.brings)


@dataclass(eq=False)
class FakeCopier:
    """
    written_in: whose each page of the device is.
    delays: of the next copies, in polls; after that none.
    """

    runner: FakeRunner
    written_in: dict[int, Namespace]
    delays: deque[int] = field(default_factory=deque)
    num_copies: int = 0

    def __post_init__(self) -> None:
        # Whose each host page is; None: of states kept, which nobody notes.
        self.on_host: dict[int, Namespace | None] = {}

    def save(self, copies: PageCopies) -> FakeCopy:
        return self._begin(copies, brings=False)

    def bring(self, copies: PageCopies) -> FakeCopy:
        return self._begin(copies, brings=True)

    def move(self, copies: PageCopies, *, brings: bool) -> None:
        kv, host = self.runner.kv, self.runner.host_kv
        pairs = zip(copies.device_pages.tolist(), copies.host_pages.tolist(), strict=True)
        if brings:
            kv[copies.device_pages] = host[copies.host_pages]
            known = {page: self.on_host.get(there) for page, there in pairs}
            self.written_in |= {page: whose for page, whose in known.items() if whose is not None}
        else:
            host[copies.host_pages] = kv[copies.device_pages]
            self.on_host |= {there: self.written_in.get(page) for page, there in pairs}

    def _begin(self, copies: PageCopies, *, brings: bool) -> FakeCopy:
        self.num_copies += 1
        delay = self.delays.popleft() if self.delays else 0
        copy = FakeCopy(self, copies, brings, delay)
        if self.num_copies % 3 == 0:
            copy.move()
        return copy

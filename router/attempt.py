"""One request at one decode node, and its move to the next one.

    main --move()--> main and successor --first token of the successor, or main's end--> successor
                            `--the successor ends before--> main

The successor runs nothing before the node of main has stopped the request and given it away, and
then tells every token from its submission on: what the client has by then comes twice and is
skipped. So main may be left as soon as the successor has said something, and not before.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from common.errors import NodeUnavailable, ServingError
from common.request import RequestSpec
from router.cluster.cluster import Chosen
from router.cluster.decode_client import Submitted
from router.cluster.migratable import Outcome
from router.losses import Doing, NodeLost
from router.repeats import Repeats
from router.timelines import Submission

_AGAIN_S = 1.0  # after a move that came to nothing


class Stay:
    """A request at one decode node; a context that leaves it there. For one event loop.

    Attributes:
        spec: as it was submitted, with the tokens that its answer had then.
        tokens: what the node says of it.
        submission: this one, of its timeline.
        here: as it is named to another decode node.
    """

    def __init__(
        self, chosen: Chosen, submitted: Submitted, submission: Submission, spec: RequestSpec
    ) -> None:
        self.chosen = chosen
        self.submission = submission
        self.spec = spec
        self.here = submitted.here
        self._submitted = submitted
        self.tokens = submitted.tokens

    @property
    def address(self) -> str:
        return self.chosen.decode.address

    def repeats(self, token_ids: Sequence[int]) -> Repeats:
        """What it is going to tell that the client has; token_ids: all that the client has."""
        return Repeats(token_ids[self.spec.num_generated :])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._submitted.leave()
        self.chosen.charge.close()


class Moving:
    """Makes a request at a decode node a Guest there; a context that ends with its stay.

    Args:
        may_move: whether it has got as far as that.
        submit: submits it elsewhere, with all tokens that it has: to the node of that address,
            empty: to any.
        on_stay: called with the node that it was to go to, and why it does not.
    """

    def __init__(
        self,
        stay: Stay,
        may_move: Callable[[], bool],
        submit: Callable[[Stay, str], Stay],
        on_stay: Callable[[str, ServingError], None],
    ) -> None:
        self._stay = stay
        self._may_move = may_move
        self._submit = submit
        self._on_stay = on_stay
        self._successor: Stay | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._again_at = 0.0

    @property
    def request_id(self) -> str:
        return self._stay.spec.request_id

    @property
    def address(self) -> str:
        return self._stay.address

    @property
    def movable(self) -> bool:
        return self._successor is None and time.monotonic() >= self._again_at and self._may_move()

    def move(self, target: str = "") -> asyncio.Task[Outcome]:
        self._task = asyncio.create_task(self._move(target))
        return self._task

    def take_successor(self) -> Stay | None:
        """Where it goes on: whoever takes it is the one to leave it. A move under way is done."""
        successor, self._successor = self._successor, None
        if successor is not None:
            self._task = None
            successor.tokens.tell()
        return successor

    async def _move(self, target: str) -> Outcome:
        self._again_at = time.monotonic() + _AGAIN_S
        try:
            successor = self._successor = self._submit(self._stay, target)
        except NodeUnavailable as nowhere:
            return Outcome("", str(nowhere))
        await successor.tokens.news()
        if self._successor is not successor:
            return Outcome(successor.address)  # its own node has given it away, and said so first
        if successor.tokens.has_begun:
            # The first end counts: that of its own node comes before all of this.
            self._stay.tokens.end(NodeLost("it goes on elsewhere", Doing.NOT_ITS_OWN))
            self._stay.tokens.tell()
            return Outcome(successor.address)
        self._again_at = time.monotonic() + _AGAIN_S
        self._successor = None
        error = successor.tokens.error()
        with successor:
            self._on_stay(successor.address, error)
        return Outcome(successor.address, str(error))

    def __enter__(self) -> Self:
        self._stay.chosen.decode.guests.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._stay.chosen.decode.guests.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._successor is not None:
            self._successor.__exit__()

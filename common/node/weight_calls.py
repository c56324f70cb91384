"""New weights, as an operator has them put in place: first looked through, which takes as long as
reading them does and holds up nobody, then put there in a pause that has taken all KV.

Knows neither files nor tensors: those are behind Weights.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ServingError
from common.node.messages import Answer, Ask
from common.node.pauses import Pausable
from common.requests.weights import UNNAMED, WeightsId


class Weights(Protocol):
    """See common/engine/update.py."""

    id: WeightsId
    whole: bool

    def prepare(self, path: str) -> Future[WeightsId]: ...

    def put(self, weights: WeightsId) -> Future[None]: ...


class Renewable(Pausable, Protocol):
    """A role."""

    def forget_cached(self) -> None:
        """Empties the prefix cache, after `let_go`."""
        ...

    def renew(self) -> None:
        """There are other weights: what waits is computed with these, and the pairs of this node
        end, for it pairs with those that have them too."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    weights: WeightsId
    future: Future[Any]
    before: WeightsId = UNNAMED  # that were computed with


class WeightCalls:
    """Engine thread only."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._preparing: list[_Asked] = []
        self._wanted: Ask | None = None  # to be put in place as soon as nobody has KV
        self._putting: _Asked | None = None
        self._num_updates = 0

    @property
    def id(self) -> WeightsId:
        """Of what is computed with."""
        return self._weights.id

    def counters(self) -> dict[str, int]:
        return {"weight_updates": self._num_updates}

    @property
    def why_busy(self) -> str:
        """Why nothing else may be done to them; empty: it may."""
        busy = self._wanted is not None or self._putting is not None
        return "its weights are being changed" if busy else ""

    @property
    def why_paused(self) -> str:
        """Why it must stay so; empty: it need not."""
        return self.why_busy or ("" if self._weights.whole else "its weights are incomplete")

    def prepare(self, ask: Ask) -> Iterator[Answer]:
        """`done` gives the answer, or this does."""
        try:
            future = self._weights.prepare(ask.argument)
        except ServingError as error:
            yield Answer(ask.number, error=str(error))
        else:
            self._preparing.append(_Asked(ask.number, UNNAMED, future))

    def put(self, ask: Ask, role: Renewable) -> Iterator[Answer]:
        """The same. argument: their id, in hexadecimal."""
        if not role.paused:
            yield Answer(ask.number, error="this node is not paused")
        elif self._wanted is not None or self._putting is not None:
            yield Answer(ask.number, error="its weights are being changed already")
        else:
            self._wanted = ask

    def done(self, role: Renewable) -> Iterator[Answer]:
        """What has come of the questions; to be called in each turn."""
        for asked in [each for each in self._preparing if each.future.done()]:
            self._preparing.remove(asked)
            yield _answer(asked)
        if self._wanted is not None and role.at_rest and role.let_go():
            ask, self._wanted = self._wanted, None
            role.forget_cached()
            yield from self._put(ask)
        if self._putting is not None and self._putting.future.done():
            asked, self._putting = self._putting, None
            if asked.future.exception() is None:
                self._num_updates += 1
                if self._weights.id != asked.before:
                    role.renew()
            yield _answer(asked)

    def _put(self, ask: Ask) -> Iterator[Answer]:
        weights = bytes.fromhex(ask.argument)
        try:
            before = self._weights.id
            self._putting = _Asked(ask.number, weights, self._weights.put(weights), before)
        except ServingError as error:
            yield Answer(ask.number, error=str(error))


def _answer(asked: _Asked) -> Answer:
    error = asked.future.exception()
    if error is None:
        return Answer(asked.number, weights=asked.future.result() or asked.weights)
    if not isinstance(error, ServingError):
        raise error
    return Answer(asked.number, error=str(error))

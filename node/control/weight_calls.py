"""Replacement of weights, as requested by an operator.

First the weights are checked, which takes as long as reading them and delays no request. Then they
are put in place during a pause that has released all KV. Weights of another node are read during
that pause too:

    wanted --at rest, no KV--> reading (from a node) --complete and correct--> putting --> done

Weights and WeightSources implement the access to files, tensors and other nodes.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ServingError
from common.requests.weights import UNNAMED, WeightsId
from node.control.inside import ControlledRole
from node.messages import NodeCall, NodeCallResult


class UpdatableWeights(Protocol):
    """The weights themselves. See engine/update.py."""

    id: WeightsId
    whole: bool

    def prepare(self, path: str) -> Future[WeightsId]: ...

    def put(self, weights: WeightsId) -> Future[None]: ...


class WeightSources(Protocol):
    """The reader of other nodes' weights. See node/sharing/weights.py."""

    def read(self, weights: WeightsId, address: str) -> Future[WeightsId]:
        """Read the weights of the node at `address`. `UpdatableWeights.put` may follow. Fails with
        a ServingError, and then nothing has changed.
        """
        ...

    def poll(self) -> None:
        """Do what is due. Called in each turn of the loop."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    weights: WeightsId
    future: Future[Any]


class WeightCalls:
    """Operators' calls about weights. Engine thread only."""

    def __init__(self, weights: UpdatableWeights, lenders: WeightSources) -> None:
        self._weights = weights
        self._lenders = lenders
        self._preparing: list[_Asked] = []
        self._wanted: NodeCall | None = None  # to be put in place as soon as no request has KV
        self._reading: _Asked | None = None
        self._putting: _Asked | None = None
        self._computed_with = self._paired_as = weights.id  # the versions that the role knows
        self._num_updates = 0

    @property
    def id(self) -> WeightsId:
        """Return the weight version in use."""
        return self._weights.id

    def counters(self) -> dict[str, int]:
        return {"weight_updates": self._num_updates}

    @property
    def why_busy(self) -> str:
        """Return why no other change of weights may start. Empty if it may."""
        steps = (self._wanted, self._reading, self._putting)
        return "its weights are being changed" if any(steps) else ""

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused. Empty if it need not."""
        return self.why_busy or ("" if self._weights.whole else "its weights are incomplete")

    def prepare(self, ask: NodeCall) -> Iterator[NodeCallResult]:
        """Check weights. The answer comes from here on an error, otherwise from `done`."""
        try:
            future = self._weights.prepare(ask.argument)
        except ServingError as error:
            yield NodeCallResult(ask.number, error=str(error))
        else:
            self._preparing.append(_Asked(ask.number, UNNAMED, future))

    def put(self, ask: NodeCall, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Put weights in place, with answers like `prepare`. argument: their id, in hexadecimal."""
        if not role.scheduler.paused:
            yield NodeCallResult(ask.number, error="this node is not paused")
        elif self.why_busy:
            yield NodeCallResult(ask.number, error="its weights are being changed already")
        else:
            self._wanted = ask

    def take(self, ask: NodeCall, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Take another node's weights, with answers like `prepare`. argument: their id and its
        address.
        """
        weights, _ = _lent(ask)
        if weights == self._weights.id and self._weights.whole and not self.why_busy:
            yield NodeCallResult(ask.number, weights=weights)
        else:
            yield from self.put(ask, role)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        self._lenders.poll()
        for asked in [each for each in self._preparing if each.future.done()]:
            self._preparing.remove(asked)
            yield _answer(asked)
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            ask, self._wanted = self._wanted, None
            role.scheduler.clear_cache()
            if ask.what == "take_weights":
                self._read(ask, role)
            else:
                yield from self._put(ask.number, bytes.fromhex(ask.argument))
        if self._reading is not None and self._reading.future.done():
            asked, self._reading = self._reading, None
            if asked.future.exception() is None:
                yield from self._put(asked.number, asked.weights)
            else:
                yield _answer(asked)
        if self._putting is not None and self._putting.future.done():
            asked, self._putting = self._putting, None
            self._num_updates += asked.future.exception() is None
            yield _answer(asked)
        if self._weights.id != self._computed_with:
            self._computed_with = self._weights.id
            role.update_waiting_requests()
        if not self.why_busy:
            self._pair_as(self._weights.id, role)

    def _read(self, ask: NodeCall, role: ControlledRole) -> None:
        """Start to read weights from another node. That node pairs only with nodes of the same
        version, so this node claims to have it until the read ends. It computes nothing meanwhile,
        and has no KV.
        """
        weights, address = _lent(ask)
        self._pair_as(weights, role)
        self._reading = _Asked(ask.number, weights, self._lenders.read(weights, address))

    def _put(self, number: int, weights: WeightsId) -> Iterator[NodeCallResult]:
        try:
            self._putting = _Asked(number, weights, self._weights.put(weights))
        except ServingError as error:
            yield NodeCallResult(number, error=str(error))

    def _pair_as(self, weights: WeightsId, role: ControlledRole) -> None:
        if weights != self._paired_as:
            self._paired_as = weights
            role.set_weight_version(weights)


def _lent(ask: NodeCall) -> tuple[WeightsId, str]:
    weights, _, address = ask.argument.partition("=")
    return bytes.fromhex(weights), address


def _answer(asked: _Asked) -> NodeCallResult:
    error = asked.future.exception()
    if error is None:
        return NodeCallResult(asked.number, weights=asked.future.result() or asked.weights)
    if not isinstance(error, ServingError):
        raise error
    return NodeCallResult(asked.number, error=str(error))

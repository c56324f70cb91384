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

from common.errors import FailedPrecondition, ServingError
from common.requests.namespace import UNNAMED, WeightsId
from node.commands import PutWeights, TakeWeights
from node.control.inside import ControlledRole
from node.messages import NodeCallResult


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
        # To be put in place as soon as no request has KV.
        self._wanted: tuple[int, PutWeights | TakeWeights] | None = None
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

    def prepare(self, number: int, path: str) -> None:
        """Check weights, with an answer from `done`. Raises ServingError if that cannot begin."""
        self._preparing.append(_Asked(number, UNNAMED, self._weights.prepare(path)))

    def begin(
        self, number: int, command: PutWeights | TakeWeights, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Put weights in place, those of another node for TakeWeights. `done` yields the answer,
        unless that node's weights are in use already.

        Raises:
            FailedPrecondition: that cannot begin now.
        """
        has_them = command.weights == self._weights.id and self._weights.whole
        if isinstance(command, TakeWeights) and has_them and not self.why_busy:
            yield NodeCallResult(number, weights=command.weights)
        elif not role.scheduler.paused:
            raise FailedPrecondition("this node is not paused")
        elif self.why_busy:
            raise FailedPrecondition("its weights are being changed already")
        else:
            self._wanted = number, command

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        self._lenders.poll()
        for asked in [each for each in self._preparing if each.future.done()]:
            self._preparing.remove(asked)
            yield _answer(asked)
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            (number, command), self._wanted = self._wanted, None
            role.scheduler.clear_cache()
            if isinstance(command, TakeWeights):
                self._read(number, command, role)
            else:
                yield from self._put(number, command.weights)
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

    def _read(self, number: int, command: TakeWeights, role: ControlledRole) -> None:
        """Start to read weights from another node. That node pairs only with nodes of the same
        version, so this node claims to have it until the read ends. It computes nothing meanwhile,
        and has no KV.
        """
        weights = command.weights
        self._pair_as(weights, role)
        self._reading = _Asked(number, weights, self._lenders.read(weights, command.address))

    def _put(self, number: int, weights: WeightsId) -> Iterator[NodeCallResult]:
        try:
            self._putting = _Asked(number, weights, self._weights.put(weights))
        except ServingError as error:
            yield NodeCallResult(number, error=str(error))

    def _pair_as(self, weights: WeightsId, role: ControlledRole) -> None:
        if weights != self._paired_as:
            self._paired_as = weights
            role.set_weight_version(weights)


def _answer(asked: _Asked) -> NodeCallResult:
    error = asked.future.exception()
    if error is None:
        return NodeCallResult(asked.number, weights=asked.future.result() or asked.weights)
    if not isinstance(error, ServingError):
        raise error
    return NodeCallResult(asked.number, error=str(error))

"""A node of the search: a consumer end, a producer end, or both over one engine."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, Self

from kvtransfer.messages import HandoffId
from tests.kvtransfer.search.sides.hand_off import (
    Input,
    Output,
    SimulatedConsumer,
    SimulatedProducer,
)


class Node:
    """The ends are independent. If they share an engine, a subclass connects them.

    An input is the name of an end with its argument, or ("restart", instance).
    """

    def __init__(
        self,
        instance: int,
        *,
        consumer: SimulatedConsumer | None = None,
        producer: SimulatedProducer | None = None,
    ) -> None:
        ends = {"consumer": consumer, "producer": producer}
        self.instance = instance
        self.consumer, self.producer = consumer, producer
        self._ends = [name for name, end in ends.items() if end is not None]

    def _end(self, name: str) -> Any:
        return self.consumer if name == "consumer" else self.producer

    def _all(self) -> list[Any]:
        return [self._end(name) for name in self._ends]

    def after(self, given: Input) -> tuple[Self, list[Output]]:
        """Return this node after an input, and its outputs to other nodes."""
        twin = copy.copy(self)
        match given:
            case ("restart", instance):
                twin.instance = instance
                twin.fork(*self._ends)
                twin.restart()
                return twin, []
            case (name, *input):
                twin.fork(name)
                return twin, twin.react(name, tuple(input))
        raise AssertionError(given)

    def fork(self, *names: str) -> None:
        """Copy these ends, which are about to change, for this node."""
        for name in names:
            setattr(self, name, self._end(name).fork())

    def react(self, name: str, given: Input) -> list[Output]:
        outputs: list[Output] = self._end(name).react(given)
        return outputs

    def restart(self) -> None:
        for end in self._all():
            end.react(("restart", self.instance))

    def key(self) -> Hashable:
        return tuple(end.key() for end in self._all())

    def moves(self) -> list[Input]:
        return [(name, *given) for name in self._ends for given in self._end(name).moves()]

    def faults(self) -> list[Input]:
        return [(name, *given) for name in self._ends for given in self._end(name).faults()]

    def at_rest(self) -> bool:
        return all(end.at_rest() for end in self._all())

    def ended(self) -> list[int]:
        """Return the requests that have ended."""
        jobs = self.consumer.jobs if self.consumer is not None else []
        return [r for r, job in enumerate(jobs) if job.state == "ended"]

    def contents(self, pages: Sequence[int]) -> tuple[Any, ...]:
        assert self.producer is not None
        return self.producer.contents(pages)

    def serves(self, pages: Sequence[int]) -> bool:
        assert self.producer is not None
        return self.producer.serves(pages)

    def live_streams(self) -> set[int]:
        return self.consumer.live_streams() if self.consumer is not None else set()

    def streams(self) -> set[int]:
        """Return the streams that its ends remember."""
        return set[int]().union(*(end.streams() for end in self._all()))

    def ids(self) -> set[HandoffId]:
        """Return the hand-off ids that any part of this node remembers."""
        return set[HandoffId]().union(*(end.ids() for end in self._all()))

    def peers(self) -> set[int]:
        """Return all instances that any part of this node remembers, including its own."""
        return {self.instance}.union(*(end.peers() for end in self._all()))

"""The faults of a scenario: their form in the file, their effect, and network conditions."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from simulation.node.link import HEALTHY, Wire

if TYPE_CHECKING:
    from simulation.virtual.cluster import VirtualCluster

ROUTER = "router"
At = Annotated[float, Meta(ge=0, le=1e6)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Factor = Annotated[float, Meta(gt=1, le=1e6)]
Pair = tuple[str, str]


KEEPALIVE_S = 15.0  # seconds until gRPC detects a silent connection (common/rpc/channels.py)
Ends = tuple[str, str]  # names of the sending and the receiving process


class WiredConnection(Protocol):
    """A connection between two processes that can be reset.

    Attributes:
        ends: names of the client and the server.
    """

    ends: Ends

    def reset(self) -> None:
        """End both sides immediately."""
        ...


class Wires:
    """Network conditions between all processes.

    Attributes:
        connections: open connections, in order.
    """

    def __init__(self) -> None:
        self._faults: list[tuple[Collection[Ends], Wire]] = []
        self.connections: dict[WiredConnection, None] = {}

    def wire(self, sender: str, receiver: str) -> Wire:
        """Return the condition in one direction."""
        if not self._faults:
            return HEALTHY
        ends = (sender, receiver)
        return reduce(or_, (wire for found, wire in self._faults if ends in found), HEALTHY)

    def both(self, one: str, other: str) -> Wire:
        """Return the worse condition of both directions."""
        there, back = self.wire(one, other), self.wire(other, one)
        return Wire(
            max(there.factor, back.factor),
            there.is_cut or back.is_cut,
            there.is_silent or back.is_silent,
        )

    async def fail(self, ends: Collection[Ends], wire: Wire, seconds: float) -> None:
        """Set these directions to a condition for some seconds."""
        with self._failing(ends, wire):
            if wire.is_cut:
                self._reset(ends)
            elif wire.is_silent and seconds > KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S)
                self._reset(ends)
                seconds -= KEEPALIVE_S
            await asyncio.sleep(seconds)

    @contextmanager
    def _failing(self, ends: Collection[Ends], wire: Wire) -> Iterator[None]:
        fault = (ends, wire)
        self._faults.append(fault)
        try:
            yield
        finally:
            self._faults = [each for each in self._faults if each is not fault]

    def _reset(self, ends: Collection[Ends]) -> None:
        for each in list(self.connections):
            client, server = each.ends
            if (client, server) in ends or (server, client) in ends:
                each.reset()


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mapping in the scenario file. Unknown keys are rejected by name."""


@runtime_checkable  # a scenario is checked when it is read
class Fault(Protocol):
    """A failure at a given time. A key that differs by kind names the process that fails.

    Attributes:
        at: seconds after the start of the load.
    """

    @property
    def at(self) -> float: ...

    async def strike(self, cluster: "VirtualCluster") -> None:
        """Cause the fault, and wait until it ends."""
        ...


class Kill(Record, frozen=True):
    """A node is killed.

    Attributes:
        restart_s: seconds until its supervisor starts it again. None: it stays down.
    """

    kill: str
    at: At
    restart_s: Seconds | None = None

    async def strike(self, cluster: "VirtualCluster") -> None:
        node = cluster.nodes[self.kill]
        await node.kill()
        if self.restart_s is not None:
            try:
                await asyncio.sleep(self.restart_s)
            finally:
                node.restart()


class Freeze(Record, frozen=True):
    """The engine of a node stops for a time. Its frontend continues."""

    freeze: str
    at: At
    seconds: Seconds

    async def strike(self, cluster: "VirtualCluster") -> None:
        await cluster.nodes[self.freeze].freeze(self.seconds)


class SlowDevice(Record, frozen=True):
    """The steps of a node take longer for a time."""

    slow_device: str
    factor: Factor
    at: At
    seconds: Seconds

    async def strike(self, cluster: "VirtualCluster") -> None:
        await cluster.nodes[self.slow_device].slow(self.factor, self.seconds)


class Cut(Record, frozen=True):
    """Connections between two processes end, and new ones are rejected for a time."""

    cut: Pair
    at: At
    seconds: Seconds

    async def strike(self, cluster: "VirtualCluster") -> None:
        await cluster.wires.fail(_both(self.cut), Wire(is_cut=True), self.seconds)


class HalfOpen(Record, frozen=True):
    """Packets from the first process to the second vanish for a time, without an error."""

    half_open: Pair
    at: At
    seconds: Seconds

    async def strike(self, cluster: "VirtualCluster") -> None:
        await cluster.wires.fail((self.half_open,), Wire(is_silent=True), self.seconds)


class SlowLink(Record, frozen=True):
    """Messages and reads between two processes take longer for a time."""

    slow_link: Pair
    factor: Factor
    at: At
    seconds: Seconds

    async def strike(self, cluster: "VirtualCluster") -> None:
        await cluster.wires.fail(_both(self.slow_link), Wire(factor=self.factor), self.seconds)


# Kinds of faults, by the key that names the process that fails.
KINDS: dict[str, type[Record]] = {
    "kill": Kill,
    "freeze": Freeze,
    "slow_device": SlowDevice,
    "cut": Cut,
    "half_open": HalfOpen,
    "slow_link": SlowLink,
}


def target(record: Any, kinds: Iterable[str]) -> Any:
    """Return the value of the key by which a record names its process."""
    return getattr(record, next(kind for kind in kinds if hasattr(record, kind)))


def targets(fault: Fault) -> tuple[str, ...]:
    """Return the names of the processes that fail, or whose connections do."""
    found = target(fault, KINDS)
    return (found,) if isinstance(found, str) else found


def record_of(content: Any, kinds: Mapping[str, type[Record]]) -> Any:
    """Return the record for a mapping of the file.

    Args:
        kinds: record types by the key that only this kind has.

    Raises:
        ValueError: the mapping is invalid.
    """
    named = [kind for kind in kinds if isinstance(content, dict) and kind in content]
    if len(named) != 1:
        raise ValueError(f"expected one of {', '.join(kinds)}")
    try:
        return msgspec.convert(content, kinds[named[0]])
    except msgspec.ValidationError as error:
        raise ValueError(f"{named[0]}: {error}") from error


def _both(pair: Pair) -> tuple[Pair, Pair]:
    return pair, (pair[1], pair[0])

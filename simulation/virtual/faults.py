"""The faults of a scenario: what the file says, and what they do."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from simulation.node.wires import Wire
from simulation.virtual.wires import Wires

ROUTER = "router"
At = Annotated[float, Meta(ge=0, le=1e6)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Factor = Annotated[float, Meta(gt=1, le=1e6)]
Pair = tuple[str, str]


class FaultyNode(Protocol):
    """A node that can fail."""

    async def kill(self) -> None: ...

    def restart(self) -> None: ...

    async def freeze(self, seconds: float) -> None: ...

    async def slow(self, factor: float, seconds: float) -> None: ...


class FaultyCluster(Protocol):
    """A cluster whose parts can fail.

    Attributes:
        wires: between its nodes and the router.
    """

    @property
    def nodes(self) -> Mapping[str, FaultyNode]: ...

    @property
    def wires(self) -> Wires: ...


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mapping of the file. Unknown keys are refused by name."""


@runtime_checkable  # a scenario is checked when it is read
class Fault(Protocol):
    """A failure at a time. The key of its kind names what fails.

    Attributes:
        at: seconds after the begin of the load.
    """

    @property
    def at(self) -> float: ...

    async def strike(self, cluster: FaultyCluster) -> None:
        """Let the fault happen, and wait until it ends."""
        ...


class Kill(Record, frozen=True):
    """A node ends, as if killed.

    Attributes:
        restart_s: seconds until its supervisor starts it again. None: it stays down.
    """

    kill: str
    at: At
    restart_s: Seconds | None = None

    async def strike(self, cluster: FaultyCluster) -> None:
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

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.nodes[self.freeze].freeze(self.seconds)


class SlowDevice(Record, frozen=True):
    """The steps of a node take longer for a time."""

    slow_device: str
    factor: Factor
    at: At
    seconds: Seconds

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.nodes[self.slow_device].slow(self.factor, self.seconds)


class Cut(Record, frozen=True):
    """Connections between two processes end, and new ones are refused for a time."""

    cut: Pair
    at: At
    seconds: Seconds

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.wires.fail(_both(self.cut), Wire(is_cut=True), self.seconds)


class HalfOpen(Record, frozen=True):
    """Packets from the first process to the second vanish for a time. No process is informed."""

    half_open: Pair
    at: At
    seconds: Seconds

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.wires.fail((self.half_open,), Wire(is_silent=True), self.seconds)


class SlowLink(Record, frozen=True):
    """Messages and reads between two processes take longer for a time."""

    slow_link: Pair
    factor: Factor
    at: At
    seconds: Seconds

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.wires.fail(_both(self.slow_link), Wire(factor=self.factor), self.seconds)


# By the key that names what fails.
KINDS: dict[str, type[Record]] = {
    "kill": Kill,
    "freeze": Freeze,
    "slow_device": SlowDevice,
    "cut": Cut,
    "half_open": HalfOpen,
    "slow_link": SlowLink,
}


def target(record: Any, kinds: Iterable[str]) -> Any:
    """Return the value of the key that names what a record of one of these kinds concerns."""
    return getattr(record, next(kind for kind in kinds if hasattr(record, kind)))


def targets(fault: Fault) -> tuple[str, ...]:
    """Return the names of the processes that fail, or whose connections do."""
    found = target(fault, KINDS)
    return (found,) if isinstance(found, str) else found


def record_of(content: Any, kinds: Mapping[str, type[Record]]) -> Any:
    """Return the record that a mapping of the file describes.

    Args:
        kinds: by the key that only this kind has.
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

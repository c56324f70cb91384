"""The faults of a scenario: what the file says, and what they do."""

from collections.abc import Mapping
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
    """A node ends, as if killed."""

    kill: str
    at: At

    async def strike(self, cluster: FaultyCluster) -> None:
        await cluster.nodes[self.kill].kill()


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


def targets(fault: Fault) -> tuple[str, ...]:
    """Return the names of the processes that fail, or whose connections do."""
    kind = next(kind for kind in KINDS if hasattr(fault, kind))
    found = getattr(fault, kind)
    return (found,) if isinstance(found, str) else found


def fault_of(content: Any) -> Fault:
    """Return the fault that a mapping of the file describes. Raises ValueError if it is invalid."""
    named = [kind for kind in KINDS if isinstance(content, dict) and kind in content]
    if len(named) != 1:
        raise ValueError(f"expected one of {', '.join(KINDS)}")
    try:
        fault: Any = msgspec.convert(content, KINDS[named[0]])
    except msgspec.ValidationError as error:
        raise ValueError(f"{named[0]}: {error}") from error
    return fault  # type: ignore[no-any-return]


def _both(pair: Pair) -> tuple[Pair, Pair]:
    return pair, (pair[1], pair[0])

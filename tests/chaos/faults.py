"""Faults of processes and their order, both determined by a seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

STOPS_S = (3.0, 8.0, 30.0)
GUESTS_S = (1.0, 8.0)  # in the other role


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one process.

    Attributes:
        what: see KINDS.
        role: "prefill" | "decode" | "router" | "all".
        number: index in its role.
        seconds: duration of a freeze, or in the other role.
    """

    what: str
    role: str
    number: int = 0
    seconds: float = 0.0

    @property
    def ends(self) -> bool:
        """Return whether the fault ends the process, which is then restarted."""
        return KINDS[self.what]

    @property
    def name(self) -> str:
        """The same for faults that are compared with each other."""
        length = f" {self.seconds:g} s" if self.seconds else ""
        return f"{self.what}{length}, {self.role}"

    def __str__(self) -> str:
        length = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.what}{length} of {self.role} {self.number}"


# Kind: whether the process ends.
KINDS = {
    "SIGKILL of the frontend": True,
    "SIGKILL of the engine": True,
    "SIGSTOP of the frontend": False,
    "SIGSTOP of the engine": False,
    "SIGTERM": True,
    "drain": True,
    "role switch": False,  # and back
    "SIGTERM after a role switch": True,  # a restarted node has its first role
    "SIGKILL of a process": False,  # of a router, which is restarted
    "renewal of the processes": False,
    "rolling restart": True,
    "SIGKILL of a rank": True,
    "SIGSTOP of a rank": False,
    "SIGSTOP of a rank that ends its node": True,
}
_OF_NODES = tuple(KINDS)[:8]
_OF_ROUTERS = tuple(KINDS)[8:10]
_OF_RANKS = tuple(KINDS)[11:]
COLLECTIVE_S = 5  # a rank that is frozen for longer ends its node
_LENGTHS_S = {
    "SIGSTOP of the frontend": STOPS_S,
    "SIGSTOP of the engine": STOPS_S,
    "role switch": GUESTS_S,
    "SIGTERM after a role switch": GUESTS_S,
    "SIGSTOP of a rank": (2.0,),
    "SIGSTOP of a rank that ends its node": (3.0 * COLLECTIVE_S,),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Faults at the same time, at most one of each role, so that the others can serve.
    Afterwards the system must be as before."""

    pause_s: float  # before it
    faults: tuple[Fault, ...]

    @property
    def breaks(self) -> bool:
        """Return whether clients lose connections because their router's process is killed."""
        return any(fault.what == "SIGKILL of a process" for fault in self.faults)


def rounds(seed: int, num_nodes: int, *, ranks: bool = False) -> Iterator[Round]:
    """Yield an endless sequence of rounds, the same for the same seed.

    Args:
        num_nodes: of each role.
        ranks: whether nodes have several ranks: all prefill nodes, and the last decode node. Each
            second round is then a fault of a rank.
    """
    draw = Random(f"chaos {seed}")
    while True:
        yield Round(draw.uniform(0.5, 3.0), tuple(_faults(draw, num_nodes)))
        if ranks:
            yield Round(draw.uniform(0.5, 3.0), (_of_a_rank(draw, num_nodes),))


def _faults(draw: Random, num_nodes: int) -> Iterator[Fault]:
    match draw.randrange(10):
        case 0:
            yield Fault("rolling restart", "all")
        case 1:
            yield Fault(draw.choice(_OF_ROUTERS), "router")
        case 2 | 3:
            for role in ("prefill", "decode"):
                yield _of_a_node(draw, role, num_nodes)
        case _:
            yield _of_a_node(draw, draw.choice(("prefill", "decode", "decode")), num_nodes)


def _of_a_rank(draw: Random, num_nodes: int) -> Fault:
    what, role = draw.choice(_OF_RANKS), draw.choice(("prefill", "decode"))
    number = draw.randrange(num_nodes) if role == "prefill" else num_nodes - 1
    return Fault(what, role, number, *_LENGTHS_S.get(what, ()))


def _of_a_node(draw: Random, role: str, num_nodes: int) -> Fault:
    what = draw.choice(_OF_NODES)
    seconds = draw.choice(_LENGTHS_S.get(what, (0.0,)))
    return Fault(what, role, draw.randrange(num_nodes), seconds)

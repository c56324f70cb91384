"""Two sides joined by streams and links that may break: every state is a value, every step a
function of it. What a side does with an input is computed once and remembered.
"""

import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from common.config import TransferConfig
from kvtransfer.messages import AnyMessage, HandoffId
from tests.kvtransfer.sides import TORN, Input, Output, OwnerSide, Plan, ReaderSide

HELLO = "hello"
Pages = tuple[int, ...]


class Wire(NamedTuple):
    """One pair stream. What is sent after the cut is lost; what was sent before may still come."""

    stream: int
    owner: int  # instance that answered
    owner_sees: bool
    reader_sees: bool
    cut: bool
    to_owner: tuple[AnyMessage, ...] = ()
    to_reader: tuple[Any, ...] = ()


class SimRead(NamedTuple):
    id: HandoffId
    source: Pages
    destination: Pages


class SimLink(NamedTuple):
    stream: int
    owner: int  # instance
    state: str  # opening | up | closing
    reads: tuple[SimRead, ...] = ()
    begun: tuple[Any, ...] | None = None  # contents when the first read began


class World(NamedTuple):
    reader: int  # number of the side's state
    owner: int
    wires: tuple[Wire, ...] = ()
    links: tuple[SimLink, ...] = ()
    faults: int = 0  # still to come


S = TypeVar("S", ReaderSide, OwnerSide)


class States(Generic[S]):
    """The states of one side, numbered, and what each does with each input."""

    def __init__(self, first: S) -> None:
        self.sides: list[S] = [first]
        self.moves: list[list[Input]] = [first.moves()]
        self.faults: list[list[Input]] = [first.faults()]
        self._numbers: dict[Hashable, int] = {first.key(): 0}
        self._known: dict[tuple[int, Input], tuple[int, list[Output]]] = {}

    def react(self, number: int, given: Input) -> tuple[int, list[Output]]:
        known = self._known.get((number, given))
        if known is None:
            known = self._known[number, given] = self._computed(number, given)
        return known

    def _computed(self, number: int, given: Input) -> tuple[int, list[Output]]:
        side = self.sides[number].fork()
        outputs = side.react(given)
        key = side.key()
        if key not in self._numbers:
            self._numbers[key] = len(self.sides)
            self.sides.append(side)
            self.moves.append(side.moves())
            self.faults.append(side.faults())
        return self._numbers[key], outputs


class Draft:
    """A world in the making: one step may have consequences on both sides."""

    def __init__(self, simulation: "Simulation", world: World) -> None:
        self._simulation = simulation
        self._world = world
        self.wires = {wire.stream: wire for wire in world.wires}
        self._links = {link.stream: link for link in world.links}

    def world(self) -> World:
        wires = tuple(w for w in self.wires.values() if w.owner_sees or w.reader_sees)
        return self._world._replace(wires=wires, links=tuple(self._links.values()))

    def wire(self, stream: int, **changes: Any) -> None:
        self.wires[stream] = self.wires[stream]._replace(**changes)

    def link(self, stream: int, **changes: Any) -> None:
        self._links[stream] = self._links[stream]._replace(**changes)

    def connect(self) -> None:
        stream = self._simulation.unused_stream(self._world)
        owner = self._simulation.owners.sides[self._world.owner].instance
        self.wires[stream] = Wire(stream, owner, True, True, False, (), (HELLO,))
        reader = self._simulation.readers.sides[self._world.reader].instance
        self.owner("up", stream, reader)

    def owner(self, *given: Any) -> None:
        number, outputs = self._simulation.owners.react(self._world.owner, given)
        self._world = self._world._replace(owner=number)
        for output in outputs:
            match output:
                case ("send", stream, message):
                    wire = self.wires[stream]
                    if not wire.cut:
                        self.wire(stream, to_reader=(*wire.to_reader, message))
                case ("end", stream):
                    self.wire(stream, owner_sees=False, cut=True)

    def reader(self, *given: Any) -> None:
        number, outputs = self._simulation.readers.react(self._world.reader, given)
        self._world = self._world._replace(reader=number)
        for output in outputs:
            match output:
                case ("send", stream, message):
                    wire = self.wires[stream]
                    if not wire.cut:
                        self.wire(stream, to_owner=(*wire.to_owner, message))
                case ("end", stream):
                    self.wire(stream, reader_sees=False, cut=True)
                case ("open link", stream):
                    self._links[stream] = SimLink(stream, self.wires[stream].owner, "opening")
                case ("close link", stream):
                    self.link(stream, state="closing")
                case ("read", stream, id, source, destination):
                    reads = self._links[stream].reads
                    self.link(stream, reads=(*reads, SimRead(id, source, destination)))

    def link_gone(self, stream: int) -> None:
        """The fence: until now the read under way may have written anything."""
        link = self._links.pop(stream)
        if link.begun is not None:
            read = link.reads[0]
            self.reader("write", read.id, read.destination, (TORN,) * len(read.destination))
        self.reader("link closed", stream)

    def read_begun(self, stream: int) -> None:
        read = self._links[stream].reads[0]
        contents = self._source(read)
        self.link(stream, begun=contents)
        self.reader("write", read.id, read.destination, (TORN,) * len(contents))

    def read_landed(self, stream: int) -> None:
        """What changed while it was read has landed in part."""
        link = self._links[stream]
        read = link.reads[0]
        then = link.begun or ()
        landed = tuple(
            now if now == old else TORN for now, old in zip(self._source(read), then, strict=True)
        )
        self.reader("write", read.id, read.destination, landed)
        self.read_over(stream, "")

    def _source(self, read: SimRead) -> tuple[Any, ...]:
        return self._simulation.owners.sides[self._world.owner].contents(read.source)

    def read_over(self, stream: int, refused: str) -> None:
        link = self._links[stream]
        self.link(stream, reads=link.reads[1:], begun=None)
        self.reader("read ended", stream, refused)

    def restart_owner(self) -> None:
        instance = self._simulation.unused_owner(self._world)
        for stream in list(self.wires):
            self.wire(stream, owner_sees=False, cut=True, to_owner=())
        self.owner("restart", instance)

    def restart_reader(self) -> None:
        instance = self._simulation.unused_reader(self._world)
        for stream in list(self.wires):
            self.wire(stream, reader_sees=False, cut=True, to_reader=())
        self._links.clear()
        self.reader("restart", instance)


Step = tuple[Any, ...]  # what happens, to which stream or by which command


class Simulation:
    """All that can happen in one pair."""

    def __init__(self, plan: Plan, config: TransferConfig) -> None:
        self.plan = plan
        self.readers = States(ReaderSide(plan, config, instance=101))
        self.owners = States(OwnerSide(plan, config, instance=11))

    def start(self, faults: int) -> World:
        return World(0, 0, faults=faults)

    def steps(self, world: World) -> list[Step]:
        """Everything but faults that may happen next."""
        steps: list[Step] = [("reader", *given) for given in self.readers.moves[world.reader]]
        steps += [("owner", *given) for given in self.owners.moves[world.owner]]
        for wire in world.wires:
            if wire.owner_sees and wire.to_owner:
                steps.append(("owner gets", wire.stream, wire.to_owner[0]))
            if wire.reader_sees and wire.to_reader:
                steps.append(("reader gets", wire.stream, wire.to_reader[0]))
            if wire.cut and wire.owner_sees:
                steps.append(("owner sees the end", wire.stream))
            if wire.cut and wire.reader_sees:
                steps.append(("reader sees the end", wire.stream))
        for link in world.links:
            steps += self._link_steps(world, link)
        if not any(wire.reader_sees for wire in world.wires):
            steps.append(("connect",))
        return steps

    def _link_steps(self, world: World, link: SimLink) -> Iterator[Step]:
        owner = self.owners.sides[world.owner]
        if link.state == "closing" or owner.instance != link.owner:
            yield "link is closed", link.stream
        elif link.state == "opening":
            yield "link is up", link.stream
        elif link.reads:
            if not owner.serves(link.reads[0].source):
                yield "read is refused", link.stream
            yield "read begins" if link.begun is None else "read ends", link.stream

    def faults(self, world: World) -> list[Step]:
        """Every fault that may happen here, if one more may."""
        if not world.faults:
            return []
        faults = list(self._faults(world))
        only = self.plan.only_faults
        return [f for f in faults if not only or f[0] in only or f[1] in only]

    def _faults(self, world: World) -> Iterator[Step]:
        for given in self.readers.faults[world.reader]:
            serial = (self.unused_serial(world),) if given[0] == "cancel" else ()
            yield "reader", *given, *serial
        for given in self.owners.faults[world.owner]:
            yield "owner", *given
        for wire in world.wires:
            if not wire.cut:
                yield "cut", wire.stream
        for link in world.links:
            if link.state != "closing":
                yield "link breaks", link.stream
            if link.state == "up" and link.begun is not None:
                yield "read is late", link.stream
        if world.wires:
            yield "owner restarts", ""
            yield "reader restarts", ""

    def again(self, world: World) -> list[Step]:
        """Requests that have ended may be submitted once more."""
        serial = self.unused_serial(world)
        jobs = enumerate(self.readers.sides[world.reader].jobs)
        return [("reader", "again", r, serial) for r, job in jobs if job.state == "ended"]

    def after(self, world: World, step: Step) -> World:
        """The world after one of its steps. Raises Broken where an invariant breaks."""
        draft = Draft(self, world)
        match step:
            case ("reader", *given):
                draft.reader(*given)
            case ("owner", *given):
                draft.owner(*given)
            case ("owner gets", stream, message):
                draft.wire(stream, to_owner=draft.wires[stream].to_owner[1:])
                draft.owner("message", stream, message)
            case ("reader gets", stream, message):
                wire = draft.wires[stream]
                draft.wire(stream, to_reader=wire.to_reader[1:])
                if message == HELLO:
                    draft.reader("up", stream, wire.owner)
                else:
                    draft.reader("message", stream, message)
            case ("owner sees the end", stream):
                draft.wire(stream, owner_sees=False)
                draft.owner("down", stream)
            case ("reader sees the end", stream):
                draft.wire(stream, reader_sees=False)
                draft.reader("down", stream)
            case ("cut", stream):
                draft.wire(stream, cut=True)
            case ("link is up", stream):
                draft.link(stream, state="up")
                draft.reader("link up", stream)
            case ("link is closed" | "link breaks", stream):
                draft.link_gone(stream)
            case ("read begins", stream):
                draft.read_begun(stream)
            case ("read ends", stream):
                draft.read_landed(stream)
            case ("read is refused", stream):
                draft.read_over(stream, "not published")
            case ("read is late", stream):
                draft.reader("read late", stream)
            case ("connect",):
                draft.connect()
            case ("owner restarts", _):
                draft.restart_owner()
            case ("reader restarts", _):
                draft.restart_reader()
        return draft.world()

    def after_fault(self, world: World, fault: Step) -> World:
        return self.after(world._replace(faults=world.faults - 1), fault)

    def rests(self, world: World) -> bool:
        """Every request has ended, and nothing is held or waited for on either side."""
        reader, owner = self.readers.sides[world.reader], self.owners.sides[world.owner]
        done = all(job.state == "ended" for job in reader.jobs)
        wanted = all(link.stream in reader.live_streams() for link in world.links)
        return done and wanted and reader.at_rest() and owner.at_rest()

    # Names ------------------------------------------------------------------------------------
    # The nodes never use one twice. Here one is used again when nothing remembers it, which is
    # the same and keeps the number of states finite.

    def unused_stream(self, world: World) -> int:
        reader, owner = self.readers.sides[world.reader], self.owners.sides[world.owner]
        used = reader.streams() | owner.streams()
        used |= {wire.stream for wire in world.wires} | {link.stream for link in world.links}
        return _least(1, used)

    def unused_owner(self, world: World) -> int:
        used = {wire.owner for wire in world.wires} | {link.owner for link in world.links}
        used |= self.readers.sides[world.reader].owners.keys()
        return _least(11, used | {self.owners.sides[world.owner].instance})

    def unused_reader(self, world: World) -> int:
        used = {id.instance for id in self._ids(world)}
        return _least(101, used | {self.readers.sides[world.reader].instance})

    def unused_serial(self, world: World) -> int:
        instance = self.readers.sides[world.reader].instance
        return _least(1, {id.request for id in self._ids(world) if id.instance == instance})

    def _ids(self, world: World) -> set[HandoffId]:
        ids = self.readers.sides[world.reader].ids() | self.owners.sides[world.owner].ids()
        for wire in world.wires:
            for message in (*wire.to_owner, *wire.to_reader):
                if hasattr(message, "id"):
                    ids.add(message.id)
        return ids


def _least(first: int, used: set[int]) -> int:
    return next(number for number in itertools.count(first) if number not in used)

"""Nodes joined by streams and links that may break. Every state is a value, and every step a
function of it. The reaction of a node to an input is computed once and cached."""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from kvtransfer.messages import HandoffId
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import TORN, Input, Output, require

HELLO = "hello"
Pages = tuple[int, ...]


class Wire(NamedTuple):
    """One pair stream. Messages sent after the cut are lost. Messages sent before it may still
    arrive."""

    stream: int
    consumer: int  # its node
    producer: int
    instance: int  # of the producer that answered
    producer_sees: bool = True
    consumer_sees: bool = True
    cut: bool = False
    half_open: bool = False  # cut, and its producer never notices the end
    to_producer: tuple[Any, ...] = ()
    to_consumer: tuple[Any, ...] = ()


class SimRead(NamedTuple):
    id: HandoffId
    source: Pages
    destination: Pages


class SimLink(NamedTuple):
    stream: int
    consumer: int  # its node
    producer: int
    instance: int  # of the producer
    state: str  # opening | up | closing
    reads: tuple[SimRead, ...] = ()
    begun: tuple[Any, ...] | None = None  # contents when the first read started


class World(NamedTuple):
    nodes: tuple[int, ...]  # number of each node's state
    wires: tuple[Wire, ...] = ()
    links: tuple[SimLink, ...] = ()
    faults: int = 0  # not delivered yet


class States:
    """The states of one node, numbered, with the reaction of each to each input."""

    def __init__(self, first: Node) -> None:
        self.nodes: list[Node] = [first]
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
        node, outputs = self.nodes[number].after(given)
        key = node.key()
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.moves.append(node.moves())
            self.faults.append(node.faults())
        return self._numbers[key], outputs


class Draft:
    """A world being computed: one step may have consequences at several nodes."""

    def __init__(self, simulation: "Simulation", world: World) -> None:
        self._simulation = simulation
        self._faults = world.faults
        self.nodes = list(world.nodes)
        self.wires = {wire.stream: wire for wire in world.wires}
        self._links = {link.stream: link for link in world.links}

    def world(self) -> World:
        wires = tuple(w for w in self.wires.values() if w.producer_sees or w.consumer_sees)
        return World(tuple(self.nodes), wires, tuple(self._links.values()), self._faults)

    def wire(self, stream: int, **changes: Any) -> None:
        self.wires[stream] = self.wires[stream]._replace(**changes)

    def link(self, stream: int, **changes: Any) -> None:
        self._links[stream] = self._links[stream]._replace(**changes)

    def node(self, node: int) -> Node:
        return self._simulation.states[node].nodes[self.nodes[node]]

    def react(self, node: int, *given: Any) -> None:
        """Return a node's state after an input, with its outputs to other nodes."""
        self.nodes[node], outputs = self._simulation.states[node].react(self.nodes[node], given)
        for output in outputs:
            match output:
                case ("send", stream, message):
                    self._send(node, self.wires[stream], message)
                case ("end", stream, violation):
                    require(not violation, f"an end that keeps the protocol broke it: {violation}")
                    seen = (
                        "consumer_sees" if self.wires[stream].consumer == node else "producer_sees"
                    )
                    self.wire(stream, cut=True, **{seen: False})
                case ("open link", stream):
                    self.open_link(self.wires[stream])
                case ("close link", stream):
                    self.close_link(stream)
                case ("read", stream, *read):
                    self.post_read(stream, SimRead(*read))

    def _send(self, node: int, wire: Wire, message: Any) -> None:
        if wire.cut:
            return
        if wire.consumer == node:
            self.wire(wire.stream, to_producer=(*wire.to_producer, message))
        else:
            self.wire(wire.stream, to_consumer=(*wire.to_consumer, message))

    def open_link(self, wire: Wire) -> None:
        link = SimLink(wire.stream, wire.consumer, wire.producer, wire.instance, "opening")
        self._links[wire.stream] = link

    def close_link(self, stream: int) -> None:
        self.link(stream, state="closing")

    def post_read(self, stream: int, read: SimRead) -> None:
        self.link(stream, reads=(*self._links[stream].reads, read))

    def of_consumer(self, stream: int, *given: Any) -> None:
        """Apply an input of the end that reads through this link."""
        self.react(self._links[stream].consumer, "consumer", *given)

    def connect(self, consumer: int, producer: int, stream: int) -> None:
        wire = Wire(stream, consumer, producer, self.node(producer).instance, to_consumer=(HELLO,))
        self.wires[stream] = wire
        self.react(producer, "producer", "up", stream, self.node(consumer).instance)

    def producer_gets(self, stream: int) -> None:
        wire = self.wires[stream]
        message = wire.to_producer[0]
        self.wire(stream, to_producer=wire.to_producer[1:])
        self.react(wire.producer, "producer", "message", stream, message)

    def consumer_gets(self, stream: int) -> None:
        wire = self.wires[stream]
        message = wire.to_consumer[0]
        self.wire(stream, to_consumer=wire.to_consumer[1:])
        if message == HELLO:
            self.react(wire.consumer, "consumer", "up", stream, wire.instance, str(wire.producer))
        else:
            self.react(wire.consumer, "consumer", "message", stream, message)

    def link_gone(self, stream: int) -> None:
        """Apply the fence: until now the running read may have written anything."""
        link = self._links[stream]
        if link.begun is not None:
            read = link.reads[0]
            self.of_consumer(stream, "write", read.id, read.destination, (TORN,) * len(link.begun))
        del self._links[stream]
        self.react(link.consumer, "consumer", "link closed", stream)

    def read_begun(self, stream: int) -> None:
        read = self._links[stream].reads[0]
        contents = self._source(stream)
        self.link(stream, begun=contents)
        self.of_consumer(stream, "write", read.id, read.destination, (TORN,) * len(contents))

    def read_landed(self, stream: int) -> None:
        """Complete a read. Data that changed during the read is only partly correct."""
        link = self._links[stream]
        read = link.reads[0]
        then = link.begun or ()
        landed = tuple(
            now if now == old else TORN for now, old in zip(self._source(stream), then, strict=True)
        )
        self.of_consumer(stream, "write", read.id, read.destination, landed)
        self.read_over(stream, "")

    def _source(self, stream: int) -> tuple[Any, ...]:
        link = self._links[stream]
        return self.node(link.producer).contents(link.reads[0].source)

    def read_over(self, stream: int, refused: str) -> None:
        self.link(stream, reads=self._links[stream].reads[1:], begun=None)
        self.of_consumer(stream, "read ended", stream, refused)

    def restart(self, node: int, instance: int) -> None:
        for stream, wire in list(self.wires.items()):
            if wire.producer == node:
                self.wire(stream, producer_sees=False, cut=True, to_producer=())
            if wire.consumer == node:
                self.wire(stream, consumer_sees=False, cut=True, to_consumer=())
        self._links = {s: link for s, link in self._links.items() if link.consumer != node}
        self.react(node, "restart", instance)


Step = tuple[Any, ...]  # the event, with its stream or with its node and command


class Simulation:
    """All events that can happen among some nodes.

    Args:
        nodes: in their first state, each with its own instance. The address of a node is its index
            here.
        dials: which node reads from which.
        only_faults: if any, no other faults happen.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        dials: Sequence[tuple[int, int]] = ((0, 1),),
        only_faults: tuple[str, ...] = (),
    ) -> None:
        self.states = [States(node) for node in nodes]
        self._dials = tuple(dials)
        self._only_faults = only_faults

    def start(self, faults: int) -> World:
        return World((0,) * len(self.states), faults=faults)

    def nodes(self, world: World) -> list[Node]:
        return [
            states.nodes[number] for states, number in zip(self.states, world.nodes, strict=True)
        ]

    def steps(self, world: World) -> list[Step]:
        """Return every possible next step, without faults."""
        steps: list[Step] = []
        for n, number in enumerate(world.nodes):
            steps += [("node", n, *given) for given in self.states[n].moves[number]]
        for wire in world.wires:
            if wire.producer_sees and wire.to_producer:
                steps.append(("producer gets", wire.stream, wire.to_producer[0]))
            if wire.consumer_sees and wire.to_consumer:
                steps.append(("consumer gets", wire.stream, wire.to_consumer[0]))
            if wire.cut and wire.producer_sees and not wire.half_open:
                steps.append(("producer sees the end", wire.stream))
            if wire.cut and wire.consumer_sees:
                steps.append(("consumer sees the end", wire.stream))
        for link in world.links:
            steps += self._link_steps(world, link)
        dialled = {(wire.consumer, wire.producer) for wire in world.wires if wire.consumer_sees}
        steps += [("connect", *dial) for dial in self._dials if dial not in dialled]
        return steps

    def _link_steps(self, world: World, link: SimLink) -> Iterator[Step]:
        producer = self.states[link.producer].nodes[world.nodes[link.producer]]
        if link.state == "closing" or producer.instance != link.instance:
            yield "link is closed", link.stream
        elif link.state == "opening":
            yield "link is up", link.stream
        elif link.reads:
            if not producer.serves(link.reads[0].source):
                yield "read is refused", link.stream
            yield "read begins" if link.begun is None else "read ends", link.stream

    def faults(self, world: World) -> list[Step]:
        """Return every possible fault, if one more is allowed."""
        if not world.faults:
            return []
        only = self._only_faults
        return [f for f in self._faults(world) if not only or any(word in only for word in f)]

    def _faults(self, world: World) -> Iterator[Step]:
        for n, number in enumerate(world.nodes):
            for given in self.states[n].faults[number]:
                serial = (self.unused_serial(world, n),) if "cancel" in given else ()
                yield "node", n, *given, *serial
        for wire in world.wires:
            if not wire.cut:
                yield "cut", wire.stream
                if "half-open" in self._only_faults:  # it multiplies the states
                    yield "half-open", wire.stream
        for link in world.links:
            yield from self._link_faults(link)
        paired = {node for wire in world.wires for node in (wire.producer, wire.consumer)}
        for n in sorted(paired):
            yield "restart", n

    def _link_faults(self, link: SimLink) -> Iterator[Step]:
        if link.state != "closing":
            yield "link breaks", link.stream
        if link.state == "up" and link.begun is not None:
            yield "read is late", link.stream

    def again(self, world: World) -> list[Step]:
        """Submit ended requests once more, if allowed."""
        return [
            ("node", n, "consumer", "again", r, self.unused_serial(world, n))
            for n, node in enumerate(self.nodes(world))
            for r in node.ended()
        ]

    def after(self, world: World, step: Step) -> World:
        """Return the world after one of its steps. Raises Broken if an invariant breaks."""
        draft = self.draft(world)
        match step:
            case ("node", n, *given):
                draft.react(n, *given)
            case ("producer gets", stream, _):
                draft.producer_gets(stream)
            case ("consumer gets", stream, _):
                draft.consumer_gets(stream)
            case ("producer sees the end", stream):
                draft.wire(stream, producer_sees=False)
                draft.react(draft.wires[stream].producer, "producer", "down", stream)
            case ("consumer sees the end", stream):
                draft.wire(stream, consumer_sees=False)
                draft.react(draft.wires[stream].consumer, "consumer", "down", stream)
            case ("cut" | "half-open" as how, stream):
                draft.wire(stream, cut=True, half_open=how == "half-open")
            case ("link is up", stream):
                draft.link(stream, state="up")
                draft.of_consumer(stream, "link up", stream)
            case ("link is closed" | "link breaks", stream):
                draft.link_gone(stream)
            case ("read begins", stream):
                draft.read_begun(stream)
            case ("read ends", stream):
                draft.read_landed(stream)
            case ("read is refused", stream):
                draft.read_over(stream, "not published")
            case ("read is late", stream):
                draft.of_consumer(stream, "read late", stream)
            case ("connect", consumer, producer):
                draft.connect(consumer, producer, self.unused_stream(world))
            case ("restart", n):
                draft.restart(n, self.unused_instance(world, n))
        return draft.world()

    def draft(self, world: World) -> Draft:
        return Draft(self, world)

    def after_fault(self, world: World, fault: Step) -> World:
        return self.after(world._replace(faults=world.faults - 1), fault)

    def rests(self, world: World) -> bool:
        """Return whether every request has ended, and no resource is held or awaited."""
        nodes = self.nodes(world)
        wanted = all(link.stream in nodes[link.consumer].live_streams() for link in world.links)
        return wanted and all(node.at_rest() for node in nodes)

    # Nodes never reuse one. Here it is reused when no part remembers it, which is equivalent and
    # keeps the number of states finite.

    def unused_stream(self, world: World) -> int:
        used = {wire.stream for wire in world.wires} | {link.stream for link in world.links}
        return _least(1, used.union(*(node.streams() for node in self.nodes(world))))

    def unused_instance(self, world: World, n: int) -> int:
        nodes = self.nodes(world)
        used = {wire.instance for wire in world.wires} | {link.instance for link in world.links}
        used |= {id.instance for id in self._ids(world)}
        return _least(self.states[n].nodes[0].instance, used.union(*(x.peers() for x in nodes)))

    def unused_serial(self, world: World, n: int) -> int:
        instance = self.nodes(world)[n].instance
        return _least(1, {id.request for id in self._ids(world) if id.instance == instance})

    def _ids(self, world: World) -> set[HandoffId]:
        ids = set[HandoffId]().union(*(node.ids() for node in self.nodes(world)))
        for wire in world.wires:
            for message in (*wire.to_producer, *wire.to_consumer):
                if hasattr(message, "id"):
                    ids.add(message.id)
        return ids


def _least(first: int, used: set[int]) -> int:
    return next(number for number in itertools.count(first) if number not in used)

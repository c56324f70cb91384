"""The search of test_hand_off_search.py with links to several ranks. Every read is done by a real
LinkGroup over members that start, end, refuse and fail in any order.

A group is rebuilt from its state for each step, and each step of a group is computed once. A page
has the published content if all members have read the same. Until the group has ended a read, or is
closed, every member may write into its pages.

Each of these was removed once. The named search fails then:
    the wait for all members before ReadEnded: each, "I2: a read wrote into a page given away" or a
        read that does not exist.
    the wait for all fences before LinkClosed: each, I2.
    the close of all members when one has closed: each, "I3: something waits for ever".
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from common.errors import TransferError
from kvtransfer.transfer.link import LinkClosed, LinkUp, ReadEnded
from tests.kvtransfer.search.search import PATIENT, PairSimulation, search_in
from tests.kvtransfer.search.sides.hand_off import TORN, Plan, require
from tests.kvtransfer.search.world import Draft, SimRead, Step, Wire, World
from tests.kvtransfer.test_link_group import Rig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]

Contents = tuple[Any, ...]


class Member(NamedTuple):
    up: bool = False
    ended: int = 0  # of the reads of its link
    begun: Contents | None = None  # contents when it started the next one
    closed: bool = False


class SimGroup(NamedTuple):
    stream: int
    consumer: int  # its node
    producer: int
    instance: int  # of the producer
    members: tuple[Member, ...]
    reads: tuple[SimRead, ...] = ()
    landed: tuple[Contents | None, ...] = ()  # by read: as members have read it
    refused: tuple[bool, ...] = ()  # by read
    closing: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        members = tuple((each.up, each.ended, each.closed) for each in self.members)
        return members, self.refused, self.closing


class Groups:
    """The reactions of groups to inputs, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Sequence[Any], bool]] = {}

    def after(self, link: SimGroup, *given: Any) -> tuple[Sequence[Any], bool]:
        """Return the events of a group, and whether its members close afterwards."""
        key = link.key, given
        if key not in self._known:
            self._known[key] = self._computed(link, *given)
        return self._known[key]

    def _computed(self, link: SimGroup, what: str, *given: Any) -> tuple[Sequence[Any], bool]:
        rig = rebuilt(link)
        match what, *given:
            case "post", number:
                rig.post(number)
            case ("close",):
                rig.group.close("told to")
            case "up", member:
                rig.members[member].up()
            case "end", member, refused:
                rig.members[member].end(refused="not published" if refused else "")
            case "fence", member:
                rig.members[member].fence()
        closing = {each.closing is not None for each in rig.members}
        require(len(closing) == 1, "some members of a group close and others do not")
        return tuple(rig.events), closing.pop()


def rebuilt(link: SimGroup) -> Rig:
    """Return a group in a state."""
    rig = Rig(len(link.members))
    for member, was in zip(rig.members, link.members, strict=True):
        if was.up:
            member.up()
    rig.post(*range(len(link.reads)))
    reported = [False] * len(link.reads)
    for member, was in zip(rig.members, link.members, strict=True):
        for read in range(was.ended):
            refuses = link.refused[read] and not reported[read]
            member.end(refused="not published" if refuses else "")
            reported[read] = True
    if link.closing:
        rig.group.close("told to")
    for member, was in zip(rig.members, link.members, strict=True):
        if was.closed:
            member.fence()
    rig.events.clear()
    return rig


class GroupDraft(Draft):
    """A step of a world whose links are groups."""

    def __init__(self, simulation: "GroupSimulation", world: World) -> None:
        super().__init__(simulation, world)
        self._groups, self._size = simulation.groups, simulation.size
        self._alike = simulation.alike

    def world(self) -> World:
        if self._alike:
            for stream, link in self._links.items():
                self._links[stream] = link._replace(  # type: ignore[assignment, call-arg]
                    members=tuple(sorted(link.members, key=hash))
                )
        return super().world()

    def open_link(self, wire: Wire) -> None:
        members = (Member(),) * self._size
        link = SimGroup(wire.stream, wire.consumer, wire.producer, wire.instance, members)
        self._links[wire.stream] = link  # type: ignore[assignment]

    def close_link(self, stream: int) -> None:
        self._give(stream, "close")

    def post_read(self, stream: int, read: SimRead) -> None:
        link = self._group(stream)
        if link.closing:  # the group rejects it
            with pytest.raises(TransferError):
                rebuilt(link).post(9)
            return
        self._give(stream, "post", len(link.reads))
        self.link(
            stream,
            reads=(*link.reads, read),
            landed=(*link.landed, None),
            refused=(*link.refused, False),
        )

    def member_step(self, step: str, stream: int, number: int) -> None:
        match step:
            case "is up":
                self._member(stream, number, up=True)
                self._give_before(stream, "up", number, up=False)
            case "begins":
                self._member(stream, number, begun=self._source_of(stream, number))
                self._write_torn(stream, number)
            case "ends":
                self._ends(stream, number, refused=False)
            case "refuses":
                self._ends(stream, number, refused=True)
            case "closes":
                if self._group(stream).members[number].begun is not None:
                    self._write_torn(stream, number)
                self._member(stream, number, begun=None, closed=True)
                self._give_before(stream, "fence", number, closed=False)

    def _ends(self, stream: int, number: int, *, refused: bool) -> None:
        link = self._group(stream)
        member = link.members[number]
        place = member.ended
        if refused:
            landed = link.landed[place]
        else:
            self._write_torn(stream, number)
            now = self._source_of(stream, number)
            landed = merged(now, member.begun, link.landed[place])
        self.link(
            stream,
            landed=put(link.landed, place, landed),
            refused=put(link.refused, place, link.refused[place] or refused),
        )
        self._member(stream, number, begun=None, ended=place + 1)
        before = link._replace(refused=link.refused)
        self._take(stream, *self._groups.after(before, "end", number, refused))

    def _give(self, stream: int, *given: Any) -> None:
        self._take(stream, *self._groups.after(self._group(stream), *given))

    def _give_before(self, stream: int, what: str, number: int, **was: Any) -> None:
        """Deliver an event of a member to the group in its state before."""
        link = self._group(stream)
        members = put(link.members, number, link.members[number]._replace(**was))
        self._take(stream, *self._groups.after(link._replace(members=members), what, number))

    def _take(self, stream: int, events: Sequence[Any], closing: bool) -> None:
        self.link(stream, closing=closing)
        for event in events:
            match event:
                case LinkUp():
                    self.of_consumer(stream, "link up", stream)
                case ReadEnded(refused=refused):
                    self._read_ended(stream, refused)
                case LinkClosed():
                    link = self._group(stream)
                    require(all(each.closed for each in link.members), "no fence of a member")
                    del self._links[stream]
                    self.react(link.consumer, "consumer", "link closed", stream)

    def _read_ended(self, stream: int, refused: str) -> None:
        link = self._group(stream)
        require(all(each.ended for each in link.members), "a member has not ended its read")
        require(bool(refused) == link.refused[0], "a refusal of one member is the group's")
        members = tuple(each._replace(ended=each.ended - 1) for each in link.members)
        self.link(
            stream,
            members=members,
            reads=link.reads[1:],
            landed=link.landed[1:],
            refused=link.refused[1:],
        )
        read, landed = link.reads[0], link.landed[0]
        if not refused:
            require(landed is not None, "nothing has landed")
            self.of_consumer(stream, "write", read.id, read.destination, landed)
        self.of_consumer(stream, "read ended", stream, refused)

    def _group(self, stream: int) -> SimGroup:
        return self._links[stream]  # type: ignore[return-value]

    def _member(self, stream: int, number: int, **changes: Any) -> None:
        members = self._group(stream).members
        changed = members[number]._replace(**changes)
        self.link(stream, members=put(members, number, changed))

    def _read_of(self, stream: int, number: int) -> SimRead:
        link = self._group(stream)
        return link.reads[link.members[number].ended]

    def _source_of(self, stream: int, number: int) -> Contents:
        producer = self.node(self._group(stream).producer)
        return producer.contents(self._read_of(stream, number).source)

    def _write_torn(self, stream: int, number: int) -> None:
        read = self._read_of(stream, number)
        torn = (TORN,) * len(read.destination)
        self.of_consumer(stream, "write", read.id, read.destination, torn)


def put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def merged(now: Contents, begun: Contents | None, landed: Contents | None) -> Contents:
    """Return the pages of a read after one more member. Data that has changed is only partly
    correct, and so is data that members have read as different."""
    assert begun is not None
    own = [new if new == old else TORN for new, old in zip(now, begun, strict=True)]
    if landed is None:
        return tuple(own)
    return tuple(a if a == b else TORN for a, b in zip(own, landed, strict=True))


class GroupSimulation(PairSimulation):
    """Hand-offs between a consumer and a producer, over this number of links.

    Args:
        alike: treat states that differ only in the order of a group's members as one.
    """

    def __init__(self, plan: Plan, size: int, *, alike: bool) -> None:
        super().__init__(plan, PATIENT)
        self.groups = Groups()
        self.size = size
        self.alike = alike

    def draft(self, world: World) -> GroupDraft:
        return GroupDraft(self, world)

    def _link_steps(self, world: World, link: Any) -> Iterator[Step]:
        producer = self.states[link.producer].nodes[world.nodes[link.producer]]
        for number, member in enumerate(link.members):
            if member.closed:
                continue
            if link.closing or producer.instance != link.instance:
                yield "member", "closes", link.stream, number
            elif not member.up:
                yield "member", "is up", link.stream, number
            elif member.ended < len(link.reads):
                if not producer.serves(link.reads[member.ended].source):
                    yield "member", "refuses", link.stream, number
                ends = "begins" if member.begun is None else "ends"
                yield "member", ends, link.stream, number

    def _link_faults(self, link: Any) -> Iterator[Step]:
        if link.closing:
            return
        for number in range(self.size):
            yield "member", "closes", link.stream, number
        if any(member.begun is not None for member in link.members):
            yield "read is late", link.stream

    def after(self, world: World, step: Step) -> World:
        if step[0] != "member":
            return super().after(world, step)
        draft = self.draft(world)
        draft.member_step(*step[1:])
        return draft.world()


ONLY_LINKS = ("member", "cut", "cancel", "fail", "tick", "read is late")
ONE, TWO = Plan((3,), (0,)), Plan((7,), (0,), only_faults=("member", "cancel"))  # reads
FOUR = replace(ONE, only_faults=ONLY_LINKS)
LONG = pytest.mark.long


# Small groups are searched in every order of their members, large ones in one order.
@pytest.mark.parametrize(
    "plan, size, faults, alike, states",
    [
        pytest.param(ONE, 1, 1, False, 1_000, id="one-rank"),
        pytest.param(ONE, 2, 1, False, 6_000, id="two-ranks"),
        pytest.param(TWO, 2, 1, False, 9_000, id="two-ranks-two-reads"),
        pytest.param(ONE, 2, 2, True, 30_000, id="two-ranks-two-faults", marks=LONG),
        pytest.param(FOUR, 4, 1, True, 20_000, id="four"),
    ],
)
def test_every_order_of_the_members_of_a_link_keeps_the_invariants(
    plan, size, faults, alike, states
):
    searched = search_in(GroupSimulation(plan, size, alike=alike), faults=faults)
    assert searched.states > states and searched.ends

"""Which nodes a request can go to now, and the wait for one when there is none for a moment."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from common.errors import NodeUnavailable
from common.requests.adapter import AdapterId
from common.requests.prefix_hint import PrefixAt
from common.requests.weights import UNNAMED, WeightsId
from protos import decode_pb2
from router.cluster.decode_client import DecodeClient
from router.cluster.known_adapters import KnownAdapters
from router.cluster.migratable import Guest
from router.cluster.survey import NodeReport, Survey
from router.policy import Policy
from router.policy.backlogs import WHENEVER, Backlogs, Due
from router.policy.choices import DecodeChoice, PlacementKey, PrefillChoice
from router.policy.hints import PrefixHints
from router.policy.load import Charge, Load

SHUTTING_DOWN = "the router is shutting down"
NOT_READY = "no decode node with a usable prefill node is ready"
NO_ADAPTER_THERE = "no decode node that is ready has the adapter"
# From the moment the last usable node was lost, or that it would come back. Longer than a reconnect
# takes, shorter than a client's patience.
GRACE_S = 2.0
_MAX_CANDIDATES = 8  # prefill nodes named to a decode node, which tries a few of them


class Chosen(msgspec.Struct, frozen=True):
    """Where a request goes: submit it before the next await, or choose again. Whoever chose closes
    the charge."""

    decode: DecodeClient
    prefill: tuple[str, ...]
    charge: Charge
    start_by: float  # time.monotonic() when its prompt should be begun; -inf: it has no turn
    prefix_at: tuple[PrefixAt, ...] = ()  # other nodes that have some of its prompt


class Cluster:
    """For one event loop. Members come and go by `add` and `remove`."""

    def __init__(
        self,
        survey: Survey,
        policy: Policy,
        load: Load,
        hints: PrefixHints,
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            hints: on who else has a prompt's beginning.
            on_change: called when `ready` may have changed.
        """
        self._survey = survey
        self._policy = policy
        self._load = load
        self._hints = hints
        self.backlogs = Backlogs(load)
        self._on_change = on_change
        self._clients: dict[str, DecodeClient] = {}
        self.adapters = KnownAdapters(self._clients)
        self.weights: WeightsId = UNNAMED  # that most decode nodes compute with
        # What each decode node that takes requests can read from; and of those the ones in use,
        # made when a node says something: requests come more often.
        self._readable: dict[str, tuple[PrefillChoice, ...]] = {}
        self._choices: Sequence[DecodeChoice] = ()
        self._awake: Sequence[DecodeChoice] = ()  # of those that are not paused
        self._hopes = False  # ready, or was, and one of its nodes may wake
        self._lost_at = -math.inf  # time.monotonic() when hope last ended
        self._closed = False
        self._news = asyncio.Event()  # of those who wait for a node

    @property
    def ready(self) -> bool:
        """Whether a request could be placed."""
        return bool(self._choices)

    def add(self, client: DecodeClient) -> None:
        """Its requests may go there as soon as it is usable."""
        self._clients[client.address] = client
        self.refresh()

    def remove(self, client: DecodeClient) -> None:
        """No request is placed on it any more."""
        if self._clients.get(client.address) is client:
            del self._clients[client.address]
        self.refresh()

    def told(self, client: DecodeClient) -> None:
        """A Status of the node has come, or its stream has ended."""
        if (status := client.status) is not None:
            self._load.shown(client.address)
            self.backlogs.told(
                client.address,
                queued_s=status.prompts.queued_s,
                token_s=status.prompts.token_s,
                pages_s=status.pages_s,
            )
        else:
            self.backlogs.forget(client.address)
        self.heard(client)
        self.adapters.told()
        told = Counter(each.weights for each in self._clients.values() if each.status)
        self.weights = max(told, key=told.__getitem__, default=UNNAMED)

    def heard(self, client: DecodeClient) -> None:
        """What its engine's pulse says has changed."""
        if self._clients.get(client.address) is client:
            self._read(client)
            self._use()

    def described(self, reports: Sequence[NodeReport]) -> None:
        """What prefill nodes say of their queues; decode nodes have a stream for that."""
        for report in reports:
            told = report.description
            if report.role != "prefill":
                continue
            if told is None:
                self.backlogs.forget(report.address)
                continue
            self.backlogs.told(
                report.address, queued_s=told.prompts.queued_s, token_s=told.prompts.token_s
            )

    def refresh(self) -> None:
        """The members, or what the survey says of them, may have changed."""
        self._readable.clear()
        for client in self._clients.values():
            self._read(client)
            client.found(self._survey.ready_instance(client.address))
        self._use()

    def close(self) -> None:
        """Nothing is placed any more, and nobody waits."""
        self._closed = True
        self._clients.clear()
        self.refresh()

    @property
    def in_use(self) -> Iterator[str]:
        """Addresses of the nodes that requests are sent to, or would be but for a pause."""
        yield from (choice.address for choice in self._choices)
        for node in self._survey.members:
            if self._survey.fit(node.address, "prefill"):
                yield node.address

    def usable(self) -> Sequence[DecodeChoice]:
        """The decode nodes that a request could go to now: paused ones where all are, to wait."""
        return self._awake or self._choices

    async def until_first_ready(self) -> None:
        """Returns once a request can be placed, whenever that is, or the router ends."""
        while not (self.ready or self._closed):
            await self._news.wait()

    async def until_ready(self) -> None:
        """Returns once a request can be placed: at once if one can.

        A node whose engine falls silent is not lost before that counts as dead.

        Raises:
            NodeUnavailable: none can, and the last usable node was lost `GRACE_S` ago, or never
                was; or the router ends.
        """
        while not (self.ready or self._closed):
            until = None if self._hopes else self._lost_at + GRACE_S - time.monotonic()
            try:
                async with asyncio.timeout(until):
                    await self._news.wait()
            except TimeoutError:
                raise NodeUnavailable(NOT_READY) from None
        if self._closed:
            raise NodeUnavailable(SHUTTING_DOWN)

    def check_in_time(self, due: Due) -> None:
        """Raises QueueTooLong where no prompt at all could be begun in time."""
        self.backlogs.in_time(self.usable(), 0, due)

    def choose(self, key: PlacementKey, avoid: Collection[str] = (), due: Due = WHENEVER) -> Chosen:
        """
        Args:
            avoid: decode nodes that are taken only where there is no other.
        Raises:
            NodeUnavailable: no decode node, with a prefill node if it needs one, is usable.
            QueueTooLong: none of them can begin with the prompt in time.
        """
        choices = _having(key.adapter, self._awake) or _having(key.adapter, self._choices)
        if not choices:
            raise NodeUnavailable(NO_ADAPTER_THERE if key.adapter else NOT_READY)
        choices = self.backlogs.in_time(choices, len(key.token_ids), due)
        if avoid:
            choices = [choice for choice in choices if choice.address not in avoid] or choices
        placement = self._policy.pick(key, choices)
        num_tokens = len(key.token_ids)
        computes = placement.prefill[0] if placement.prefill else placement.decode
        start_by = self.backlogs.start_by(computes, num_tokens, due)
        return Chosen(
            self._clients[placement.decode],
            placement.prefill[:_MAX_CANDIDATES],
            self._load.charge(placement, num_tokens, start_by, due.priority),
            start_by,
            self._hints.of(key, placement),
        )

    def choose_target(self, key: PlacementKey, source: str, wanted: str = "") -> Chosen:
        """Where a request goes on that runs at `source`: no prompt is computed.

        Args:
            wanted: address of the node; empty: any.
        Raises:
            NodeUnavailable: no other decode node is usable, or that one is not.
        """
        having = _having(key.adapter, self._awake)
        choices = [choice for choice in having if choice.address != source]
        if wanted:
            choices = [choice for choice in choices if choice.address == wanted]
        if not choices:
            raise NodeUnavailable(
                f"{wanted} is no other decode node that is ready for it"
                if wanted
                else "no other decode node is ready"
            )
        picked = self._policy.pick(key, choices)
        placement = replace(picked, prefill=(), uncached_tokens=0)
        charge = self._load.charge(placement, len(key.token_ids))
        charge.first_token()
        return Chosen(self._clients[placement.decode], (), charge, -math.inf)

    def guests(self) -> Iterator[Guest]:
        """All requests that may be moved, now or later."""
        for client in self._clients.values():
            yield from client.guests

    def _read(self, client: DecodeClient) -> None:
        """Takes up what a decode node has said. Of one node only: each says something twice a
        second, and has a link to every prefill node."""
        status = client.status
        taking = status is not None and status.state == "ready" and client.moves
        if status is None or not taking or not self._survey.fit(client.address, "decode"):
            self._readable.pop(client.address, None)
            return
        fit = [link for link in status.links if self._survey.fit(link.peer, "prefill")]
        awake = [link for link in fit if not self._survey.paused(link.peer)]
        self._readable[client.address] = tuple(
            PrefillChoice(link.peer, link.path, link.gib_per_s) for link in awake or fit
        )

    def _use(self) -> None:
        hoped = self._hopes
        clients = tuple(self._clients.values())
        awake = tuple(client for client in clients if not client.paused)
        self._choices = self._usable(clients)
        self._awake = self._choices if awake == clients else self._usable(awake)
        self._hopes = self.ready or (hoped and any(map(self._may_wake, clients)))
        if hoped and not self._hopes:
            self._lost_at = time.monotonic()
        if self.ready or not self._hopes:
            self._news.set()
            self._news = asyncio.Event()
        self._on_change()

    def _may_wake(self, client: DecodeClient) -> bool:
        """Whether all that keeps a node from requests is a pause, in which its pairs may end and
        come back, or a silence of its engine that may end."""
        status = client.status
        if status is None or status.state != "ready" or client.dead:
            return False
        return client.paused or not client.moves or self._survey.silent(client.address)

    def _usable(self, clients: Sequence[DecodeClient]) -> Sequence[DecodeChoice]:
        """Those of the decode nodes that can take a request, with the prefill nodes they can read
        from."""
        return self._taking(clients, lambda status: status.serves_alone) or self._taking(
            clients, lambda status: status.falls_back
        )

    def _taking(
        self, clients: Sequence[DecodeClient], alone: Callable[[decode_pb2.Status], bool]
    ) -> Sequence[DecodeChoice]:
        """
        Args:
            alone: whether a node may be used without any prefill node.
        """
        usable = []
        for client in clients:
            prefill, status = self._readable.get(client.address), client.status
            if prefill is None or status is None:
                continue
            if prefill or alone(status):
                pages = status.pages_total, status.pages_free, status.page_size
                adapters = frozenset(client.adapters.values())
                usable.append(DecodeChoice(client.address, prefill, *pages, adapters))
        return usable


def _having(adapter: AdapterId, choices: Sequence[DecodeChoice]) -> Sequence[DecodeChoice]:
    """Those that have it."""
    if not adapter:
        return choices
    return [choice for choice in choices if adapter in choice.adapters]

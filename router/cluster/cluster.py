"""The usable nodes of one model, their LoRA adapters, and the choice of nodes for a request."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from common.config import FingerprintChange
from common.errors import NodeUnavailable, NotFound
from common.request import PrefixHint
from common.requests.namespace import NO_ADAPTER, UNNAMED, AdapterId, WeightsId
from protos import decode_pb2
from router.cluster.cluster_state import ClusterState, NodeReport
from router.cluster.decode_client import DecodeClient, MigratableRequest
from router.policy.load import (
    WHENEVER,
    DecodeChoice,
    LoadReservation,
    NodeBacklogs,
    NodeLoad,
    PlacementKey,
    PrefillChoice,
    RequestDue,
)
from router.policy.policies import RoutingPolicy
from router.policy.prefix_index import PrefixIndex


class KnownAdapters:
    """LoRA adapters of all decode nodes. For one event loop.

    Args:
        clients: decode nodes by address. The caller keeps it up to date.
    """

    def __init__(self, clients: Mapping[str, DecodeClient]) -> None:
        self._clients = clients
        self._news = asyncio.Event()  # set when a node has sent a Status

    def by_name(self) -> Mapping[str, AdapterId]:
        """Return the id of each adapter by name. If nodes disagree, the first node's id is used."""
        found: dict[str, AdapterId] = {}
        for _, client in sorted(self._clients.items()):
            for name, adapter in client.adapters.items():
                found.setdefault(name, adapter)
        return found

    def of(self, name: str) -> AdapterId:
        """Return the id of an adapter.

        Args:
            name: "" means no adapter.
        Raises:
            NotFound: no node has the adapter.
        """
        if not name:
            return NO_ADAPTER
        adapter = self.by_name().get(name)
        if adapter is None:
            raise NotFound(f"adapter: {name!r} is not loaded")
        return adapter

    def wake(self) -> None:
        """Wake `until`, because a node has sent a Status."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, name: str, adapter: AdapterId | None, longest_s: float) -> None:
        """Wait until every node with a Status has this adapter under that name.

        Args:
            adapter: None: wait until no node has an adapter of that name.
            longest_s: time limit in seconds. Returns without an error when it expires.
        """

        def says(client: DecodeClient) -> bool:
            return client.status is None or client.adapters.get(name) == adapter

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while not all(says(client) for client in self._clients.values()):
                    await self._news.wait()


SHUTTING_DOWN = "the router is shutting down"
NOT_READY = "no decode node with a usable prefill node is ready"
OTHER_FINGERPRINT = "no ready decode node has the system_fingerprint of the response so far"
NO_ADAPTER_THERE = "no ready decode node has the adapter"


def of_model(sentence: str, served: str) -> str:
    """Prefix an error message with the model's name, unless the name is empty."""
    return f"model {served!r}: {sentence}" if served else sentence


# Counted from the time when no node was usable or expected to recover. Longer than a reconnect,
# shorter than a client's patience.
GRACE_S = 2.0
_MAX_CANDIDATES = 8  # prefill nodes sent to a decode node, which tries only a few


class Placed(msgspec.Struct, frozen=True):
    """Nodes chosen for a request.

    Submit the request before the next await, or choose again. The caller closes the charge.
    """

    decode: DecodeClient
    prefill: tuple[str, ...]
    charge: LoadReservation
    start_by: float  # time.monotonic() by which its prompt should start; -inf: not queued
    prefix_at: tuple[PrefixHint, ...] = ()  # other nodes that have part of its prompt cached
    encoders: tuple[str, ...] = ()  # all usable encode nodes


class FingerprintUnavailable(NodeUnavailable):
    """Decode nodes are ready, but none can continue a batch-invariant response."""


class Cluster:
    """Nodes of one model, changed by `add` and `remove`. For one event loop."""

    def __init__(
        self,
        state: ClusterState,
        policy: RoutingPolicy,
        load: NodeLoad,
        backlogs: NodeBacklogs,
        prefixes: PrefixIndex,
        on_change: Callable[[], None],
        served: str = "",
        fingerprint_change: FingerprintChange = "fail",
    ) -> None:
        """
        Args:
            prefixes: finds other nodes that have a prefix of a prompt cached.
            on_change: called when nodes changed, so that `ready` or a prefill node may differ.
            served: model name for errors. Empty if the router has only one model.
            fingerprint_change: see RouterConfig.
        """
        self._not_ready = of_model(NOT_READY, served)
        self._no_adapter = of_model(NO_ADAPTER_THERE, served)
        state.on_change = self.refresh
        state.on_reports.append(self.described)
        self._state = state
        self._policy = policy
        self._load = load
        self._prefixes = prefixes
        self._keeps_fingerprint = fingerprint_change == "fail"
        self.backlogs = backlogs
        self._on_change = on_change
        self._clients: dict[str, DecodeClient] = {}
        self.adapters = KnownAdapters(self._clients)
        self.weights: WeightsId = UNNAMED  # weight version of most decode nodes
        # Decode nodes with the prefill nodes that each can read from, and the usable decode nodes.
        # Updated when a node reports a change, which is rarer than requests.
        self._readable: dict[str, tuple[PrefillChoice, ...]] = {}
        self._choices: Sequence[DecodeChoice] = ()
        self._awake: Sequence[DecodeChoice] = ()  # usable decode nodes that are not paused
        self._encoders: tuple[str, ...] = ()  # encode nodes that are usable
        self._may_recover = False  # a node is ready, or was ready and may recover
        self._lost_at = -math.inf  # time.monotonic() when `_may_recover` last ended
        self._closed = False
        self._news = asyncio.Event()  # set for requests that wait for a node

    @property
    def ready(self) -> bool:
        """True if a request could be placed."""
        return bool(self._choices)

    def add(self, client: DecodeClient) -> None:
        """Add a decode node. It gets requests as soon as it is usable."""
        self._clients[client.address] = client
        self.refresh()

    def remove(self, client: DecodeClient) -> None:
        """Remove a decode node. It gets no new requests."""
        if self._clients.get(client.address) is client:
            del self._clients[client.address]
        self.refresh()

    def status_changed(self, client: DecodeClient) -> None:
        """Process a new Status of a node, or the end of its stream."""
        if (status := client.status) is not None:
            self._load.shown(client.address)
            self.backlogs.record(
                client.address,
                queued_s=status.prompts.queued_s,
                token_s=status.prompts.token_s,
                pages_s=status.pages_s,
            )
        else:
            self.backlogs.forget(client.address)
        self.heard(client)
        self.adapters.wake()
        counts = Counter(each.weights for each in self._clients.values() if each.status)
        self.weights = max(counts, key=counts.__getitem__, default=UNNAMED)

    def heard(self, client: DecodeClient) -> None:
        """Process a change of the engine's liveness at a node."""
        if self._clients.get(client.address) is client:
            self._update_links(client)
            self._update_choices()

    def described(self, reports: Sequence[NodeReport]) -> None:
        """Record reported queue times of prefill nodes. Decode nodes use their streams."""
        for report in reports:
            description = report.description
            if report.role != "prefill":
                continue
            if description is None:
                self.backlogs.forget(report.address)
                continue
            self.backlogs.record(
                report.address,
                queued_s=description.prompts.queued_s,
                token_s=description.prompts.token_s,
            )

    def refresh(self) -> None:
        """Update all nodes after nodes joined or left, or their descriptions changed."""
        self._readable.clear()
        addresses = (node.address for node in self._state.members)
        self._encoders = tuple(each for each in addresses if self._state.fit(each, "encode"))
        for client in self._clients.values():
            self._update_links(client)
            client.found(self._state.ready_instance(client.address))
        self._update_choices()
        self._on_change()

    def close(self) -> None:
        """Stop placing requests and end all waits."""
        self._closed = True
        self._clients.clear()
        self.refresh()

    @property
    def in_use(self) -> Iterator[str]:
        """Addresses of the nodes that get requests, including paused ones."""
        yield from (choice.address for choice in self._choices)
        yield from self._encoders
        for node in self._state.members:
            if self._state.fit(node.address, "prefill"):
                yield node.address

    def usable(self) -> Sequence[DecodeChoice]:
        """Return the decode nodes that may get a request. Paused nodes only if all are paused."""
        return self._awake or self._choices

    async def until_first_ready(self) -> None:
        """Wait without a time limit until a request can be placed or the router shuts down."""
        while not (self.ready or self._closed):
            await self._news.wait()

    async def until_ready(self) -> None:
        """Wait until a request can be placed. Returns immediately if one can.

        A node with a silent engine counts as lost only when its engine counts as dead.

        Raises:
            NodeUnavailable: no node has been usable for `GRACE_S`, no node was ever usable, or the
                router shuts down.
        """
        while not (self.ready or self._closed):
            until = None if self._may_recover else self._lost_at + GRACE_S - time.monotonic()
            try:
                async with asyncio.timeout(until):
                    await self._news.wait()
            except TimeoutError:
                raise NodeUnavailable(self._not_ready) from None
        if self._closed:
            raise NodeUnavailable(SHUTTING_DOWN)

    def check_in_time(self, due: RequestDue) -> None:
        """Raise QueueFull if not even an empty prompt could start in time."""
        self.backlogs.in_time(self.usable(), 0, due)

    def choose(
        self, key: PlacementKey, avoid: Collection[str] = (), due: RequestDue = WHENEVER
    ) -> Placed:
        """Choose the nodes for a request.

        Args:
            avoid: decode nodes to use only if there are no others.
        Raises:
            NodeUnavailable: no decode node is usable, or none has a prefill node that it needs.
            FingerprintUnavailable: only nodes with another fingerprint are usable.
            QueueFull: no node can start the prompt in time.
        """
        choices = _having(key.adapter, self._awake) or _having(key.adapter, self._choices)
        if not choices:
            raise NodeUnavailable(self._no_adapter if key.adapter else self._not_ready)
        choices = self._continuing(key.invariant_fingerprint, choices)
        choices = self.backlogs.in_time(choices, len(key.token_ids), due)
        if avoid:
            choices = [choice for choice in choices if choice.address not in avoid] or choices
        placement = self._policy.pick(key, choices)
        num_tokens = len(key.token_ids)
        computes = placement.prefill[0] if placement.prefill else placement.decode
        start_by = self.backlogs.start_by(computes, num_tokens, due)
        return Placed(
            self._clients[placement.decode],
            placement.prefill[:_MAX_CANDIDATES],
            self._load.charge(placement, num_tokens, start_by, due.priority),
            start_by,
            self._prefixes.hints(key, placement),
            self._encoders,
        )

    def choose_target(self, key: PlacementKey, source: str, target: str = "") -> Placed:
        """Choose the target of a live migration from `source`. The target computes no prompt.

        Args:
            target: address of the target. Empty: any.
        Raises:
            NodeUnavailable: no other decode node is usable, or the target is not.
            FingerprintUnavailable: only nodes with another fingerprint are usable.
        """
        choices = [
            replace(choice, prefill=())
            for choice in _having(key.adapter, self._awake)
            if choice.address != source and target in ("", choice.address)
        ]
        if not choices:
            raise NodeUnavailable(
                f"{target} is not another decode node that is ready for the request"
                if target
                else "no other decode node is ready"
            )
        picked = self._policy.pick(key, self._continuing(key.invariant_fingerprint, choices))
        placement = replace(picked, uncached_tokens=0)
        charge = self._load.charge(placement, len(key.token_ids))
        charge.first_token()
        return Placed(self._clients[placement.decode], (), charge, -math.inf)

    def _continuing(
        self, fingerprint: str, choices: Sequence[DecodeChoice]
    ) -> Sequence[DecodeChoice]:
        """Return the decode nodes that can continue a response.

        Args:
            fingerprint: PlacementKey.invariant_fingerprint.
        Raises:
            FingerprintUnavailable: no node in `choices` has the fingerprint.
        """
        if not fingerprint:
            return choices
        same = [choice for choice in choices if choice.invariant_fingerprint == fingerprint]
        if not same and self._keeps_fingerprint:
            raise FingerprintUnavailable(OTHER_FINGERPRINT)
        return same or choices

    def migratable(self) -> Iterator[MigratableRequest]:
        """Yield all requests that can be migrated, now or later."""
        for client in self._clients.values():
            yield from client.migratable

    def _update_links(self, client: DecodeClient) -> None:
        """Update the choice for one decode node.

        Not for all nodes: each reports twice a second and has a link to every prefill node.
        """
        status = client.status
        accepts = status is not None and status.state == "ready" and client.moves
        if status is None or not accepts or not self._state.fit(client.address, "decode"):
            self._readable.pop(client.address, None)
            return
        fit = [link for link in status.links if self._state.fit(link.peer, "prefill")]
        awake = [link for link in fit if not self._state.paused(link.peer)]
        self._readable[client.address] = tuple(
            PrefillChoice(link.peer, link.path, link.gib_per_s) for link in awake or fit
        )

    def _update_choices(self) -> None:
        could_recover, was_ready = self._may_recover, self.ready
        clients = tuple(self._clients.values())
        awake = tuple(client for client in clients if not client.paused)
        self._choices = self._usable(clients)
        self._awake = self._choices if awake == clients else self._usable(awake)
        recoverable = could_recover and any(map(self._may_become_usable, clients))
        self._may_recover = self.ready or recoverable
        if could_recover and not self._may_recover:
            self._lost_at = time.monotonic()
        if self.ready or not self._may_recover:
            self._news.set()
            self._news = asyncio.Event()
        if self.ready != was_ready:
            self._on_change()

    def _may_become_usable(self, client: DecodeClient) -> bool:
        """Return whether the node is usable except for a pause or a silent engine.

        A paused node may lose its pairs and open them again.
        """
        status = client.status
        if status is None or status.state != "ready" or client.dead:
            return False
        return client.paused or not client.moves or self._state.silent(client.address)

    def _usable(self, clients: Sequence[DecodeClient]) -> Sequence[DecodeChoice]:
        """Return the decode nodes that can accept a request, with the prefill nodes of each."""
        return self._accepting(clients, lambda status: status.serves_alone) or self._accepting(
            clients, lambda status: status.falls_back
        )

    def _accepting(
        self, clients: Sequence[DecodeClient], alone: Callable[[decode_pb2.Status], bool]
    ) -> Sequence[DecodeChoice]:
        """Return the decode nodes of `clients` that can accept a request.

        Args:
            alone: returns whether a node may be used without a prefill node.
        """
        usable = []
        for client in clients:
            prefill, status = self._readable.get(client.address), client.status
            if prefill is None or status is None:
                continue
            if prefill or alone(status):
                pages = status.pages_total, status.pages_free, status.page_size
                adapters = frozenset(client.adapters.values())
                fingerprint = client.version.invariant_fingerprint
                usable.append(DecodeChoice(client.address, prefill, *pages, adapters, fingerprint))
        return usable


def _having(adapter: AdapterId, choices: Sequence[DecodeChoice]) -> Sequence[DecodeChoice]:
    if not adapter:
        return choices
    return [choice for choice in choices if adapter in choice.adapters]

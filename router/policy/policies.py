"""All routing policies, their common choice of decode nodes, and the choice of encode nodes."""

import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from xxhash import xxh3_64_intdigest

from common.request import RequestSpec
from common.requests.images import Image
from common.requests.namespace import BYTES_PER_TOKEN, as_bytes
from router.policy.load import (
    DecodeChoice,
    LoadReservation,
    NodeBacklogs,
    NodeLoad,
    PlacementDecision,
    PlacementKey,
    PrefillChoice,
)
from router.policy.prefix_index import PrefixIndex, PromptPrefixes

# Half the link speed costs as much as this share of the pages, for at most five halvings.
_SHARE_PER_HALVING = 0.05
_MOST_HALVINGS = 5
# Assumed speeds of unmeasured links.
_USUAL_GIB_PER_S = {"nvlink": 200.0, "cuda_ipc": 50.0, "rdma": 20.0, "cma": 8.0, "tcp": 2.0}
_MOST_GIB_PER_S = 1e6
_MAX_KNOWN = 1024  # nodes
# Image tokens by which an encode node may exceed the least loaded one: two images of the default
# size limit.
MAX_MORE_IMAGE_TOKENS = 2560
_NAME_TOKENS = 4  # first tokens of an image, which identify its content

T = TypeVar("T")


def encode_nodes(
    spec: RequestSpec, encoders: Sequence[str], charge: LoadReservation
) -> tuple[str, ...]:
    """Choose and charge the encode node of each image. Empty if there are no encode nodes.

    Uses rendezvous hashing by content: an image goes to the node that has its embeddings cached,
    and few images change nodes when nodes join or leave. A node is skipped while it has far more
    image tokens than the least loaded one.
    """
    if not encoders:
        return ()

    def node_of(image: Image) -> str:
        end = min(image.at + _NAME_TOKENS, image.end)
        # The ids of its tokens are derived from its content.
        content = spec.token_ids[BYTES_PER_TOKEN * image.at : BYTES_PER_TOKEN * end]
        loads = {node: charge.encoding(node) for node in encoders}
        most = min(loads.values()) + MAX_MORE_IMAGE_TOKENS
        light = (node for node, load in loads.items() if load <= most)
        node = max(light, key=lambda node: xxh3_64_intdigest(content + node.encode()))
        charge.encodes(node, image.num_tokens)
        return node

    return tuple(map(node_of, spec.images))


class RotatingOrder:
    """Rotates among equal nodes."""

    def __init__(self) -> None:
        self._turn = 0

    def rotated(self, items: list[T]) -> list[T]:
        """Return the items, starting one item later at each call."""
        if len(items) < 2:
            return items
        self._turn += 1
        first = self._turn % len(items)
        return items[first:] + items[:first]


class LeastLoadedDecode:
    """Choice of the least full decode node, shared by most policies.

    Fullness is the share of KV pages in use, plus pages for requests that this router has placed
    since the last Status. Among about equally full nodes, the one with the faster links is chosen.
    Equal nodes take turns.
    """

    def __init__(self, load: NodeLoad) -> None:
        self._load = load
        self._turn = 0
        # By address. Recomputed when the node's links change.
        self._speeds: dict[str, tuple[tuple[PrefillChoice, ...], float]] = {}

    def pick(self, choices: Sequence[DecodeChoice]) -> DecodeChoice:
        """Return one of `choices`, which is not empty."""
        if len(choices) == 1:
            return choices[0]
        speeds = [self._speed(choice) for choice in choices]
        fastest = max(speeds)
        self._turn += 1
        first = self._turn % len(choices)
        best, best_key = choices[first], (math.inf, 0)
        for offset in range(len(choices)):
            at = (first + offset) % len(choices)
            # Whole halvings, because measurements of one kind of link differ by less.
            halvings = min(_MOST_HALVINGS, int(fastest - speeds[at]))
            fullness = self._fullness(choices[at]) + _SHARE_PER_HALVING * halvings
            key = fullness, self._load.decode.requests(choices[at].address)
            if key < best_key:
                best, best_key = choices[at], key
        return best

    def _fullness(self, choice: DecodeChoice) -> float:
        """Return the share of its pages in use or reserved, 0.0 to 1.0. 0 if unknown."""
        if not choice.pages_total:
            return 0.0
        used = max(0, choice.pages_total - choice.pages_free)
        placed = self._load.decode.tokens(choice.address) / max(1, choice.page_size)
        return (used + placed) / choice.pages_total

    def _speed(self, choice: DecodeChoice) -> float:
        """Return the mean speed of its links, as log2 of GiB/s."""
        known = self._speeds.get(choice.address)
        if known is not None and known[0] is choice.prefill:
            return known[1]
        if len(self._speeds) >= _MAX_KNOWN:
            self._speeds.clear()
        logs = [_log2_speed(link) for link in choice.prefill]
        speed = sum(logs) / len(logs) if logs else 0.0
        self._speeds[choice.address] = choice.prefill, speed
        return speed


def _log2_speed(link: PrefillChoice) -> float:
    """Return the log2 speed of a link, finite for any reported value."""
    if link.gib_per_s > 0:  # rejects NaN too
        return math.log2(min(link.gib_per_s, _MOST_GIB_PER_S))
    return math.log2(_USUAL_GIB_PER_S.get(link.path, 1.0))


# Chooses one of several decode nodes, and orders the addresses of its prefill nodes, best first.
ChooseDecode: TypeAlias = Callable[[Sequence[DecodeChoice]], DecodeChoice]
OrderPrefill: TypeAlias = Callable[[PlacementKey, list[str]], Sequence[str]]


class TwoStep:
    """Policy that chooses a decode node, and then orders the prefill nodes that it can read."""

    def __init__(self, choose: ChooseDecode, order: OrderPrefill) -> None:
        self._choose = choose
        self._order = order

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._choose(choices)
        nodes = self._order(key, [node.address for node in decode.prefill])
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))


def least_by(
    load: NodeLoad,
    of_prefill: Callable[[str], Any],
    of_decode: Callable[[str], Any] | None = None,
) -> TwoStep:
    """Return a policy that orders nodes by a number. Equal prefill nodes take turns.

    Among decode nodes with the lowest number, the least full one is chosen.

    Args:
        of_prefill: returns the number of a prefill node at an address.
        of_decode: the same of a decode node. None: all decode nodes are equal.
    """
    least, turns = LeastLoadedDecode(load), RotatingOrder()

    def choose(choices: Sequence[DecodeChoice]) -> DecodeChoice:
        if of_decode is None or len(choices) == 1:
            return least.pick(choices)
        numbers = [of_decode(choice.address) for choice in choices]
        lowest = min(numbers)
        return least.pick(
            [each for each, number in zip(choices, numbers, strict=True) if number == lowest]
        )

    return TwoStep(choose, lambda _, nodes: sorted(turns.rotated(nodes), key=of_prefill))


def least_tokens(load: NodeLoad) -> TwoStep:
    """Return the least-loaded policy: the prefill node with the fewest tokens to compute."""
    return least_by(load, load.prefill.tokens)


def least_requests(load: NodeLoad) -> TwoStep:
    """Return the least-requests policy: the nodes with the fewest requests of this router.

    Prompts count equally, whatever their length. Prefill nodes count requests without a first
    token, decode nodes all running ones.
    """
    return least_by(load, load.prefill.requests, load.decode.requests)


def shortest_queue(load: NodeLoad, backlogs: NodeBacklogs) -> TwoStep:
    """Return the shortest-queue policy: the nodes where a new request starts soonest.

    Uses the queue times that nodes report, which include other routers' requests and the speed of
    each node. Nodes of unknown speed are ordered by the tokens that this router has queued there.
    """

    def queue(address: str) -> tuple[float, int]:
        return backlogs.queue_s(address), load.queued.tokens(address)

    return least_by(load, queue, queue)


def power_of_two(load: NodeLoad, rng: random.Random) -> TwoStep:
    """Return the power-of-two-choices policy: the less loaded of two random nodes.

    Balances almost as well as the least-loaded policy, and independent routers do not all choose
    the same node.
    """
    least = LeastLoadedDecode(load)

    def order(_: PlacementKey, nodes: list[str]) -> Sequence[str]:
        rng.shuffle(nodes)
        return [*sorted(nodes[:2], key=load.prefill.tokens), *nodes[2:]]

    return TwoStep(lambda choices: least.pick(rng.sample(choices, min(2, len(choices)))), order)


def random_nodes(rng: random.Random) -> TwoStep:
    """Return the random policy: any node, with equal probability."""
    return TwoStep(rng.choice, lambda _, nodes: rng.sample(nodes, len(nodes)))


class RoundRobin:
    """Round-robin policy: nodes take turns, and so do pairs of nodes."""

    def __init__(self) -> None:
        self._num_picked = 0

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        turn = self._num_picked
        self._num_picked += 1
        decode = choices[turn % len(choices)]
        nodes = [choice.address for choice in decode.prefill]
        if nodes:
            # With as many prefill as decode nodes, two plain rotations would repeat the same pairs.
            first = (turn + turn // math.lcm(len(nodes), len(choices))) % len(nodes)
            nodes = nodes[first:] + nodes[:first]
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))


MAX_SESSIONS = 1 << 16  # beyond that, the least recently used session is dropped


class SessionAffinity:
    """Session-affinity policy: requests of a session use the same nodes, which cache its KV.

    The first request of a session, and requests without a session, go to the least-loaded nodes.
    """

    def __init__(self, load: NodeLoad) -> None:
        self._least = least_tokens(load)
        self._homes: OrderedDict[str, tuple[str, str]] = OrderedDict()  # decode, prefill

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode, prefill = self._homes.get(key.session_id, ("", ""))
        at_home = [choice for choice in choices if choice.address == decode]
        placement = self._least.pick(key, at_home or choices)
        if prefill in placement.prefill:
            others = (node for node in placement.prefill if node != prefill)
            placement = PlacementDecision(
                placement.decode, (prefill, *others), placement.uncached_tokens
            )
        if key.session_id:
            home = placement.decode, placement.prefill[0] if placement.prefill else ""
            self._homes[key.session_id] = home
            self._homes.move_to_end(key.session_id)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return placement


def _by_key(key: int, nodes: Iterable[str]) -> list[str]:
    """Return the nodes in the order of rendezvous hashing for a key."""
    return sorted(nodes, key=lambda node: -xxh3_64_intdigest(node.encode(), key))


KEY_TOKENS = 256  # of the prompt; requests of one application often share them
MOST_OVER_MEAN = 1.25


def consistent_hash(load: NodeLoad) -> TwoStep:
    """Return the consistent-hashing policy: equal keys share a prefill node, from every router.

    The key is the session, or else the namespace and the beginning of the prompt. Each node gets a
    score from the key and its address, and the highest score wins (rendezvous hashing, Thaler and
    Ravishankar 1996). If a node leaves, only its keys move. A new node takes an equal share of keys
    from each other node. A node is skipped if its queue is a quarter longer than the mean plus one
    prompt, because one key could overload it (consistent hashing with bounded loads, Mirrokni et
    al. 2018).
    """

    def order(key: PlacementKey, nodes: list[str]) -> Sequence[str]:
        name = xxh3_64_intdigest(
            key.session_id.encode() or key.namespace + as_bytes(key.token_ids[:KEY_TOKENS])
        )
        queued = {node: load.prefill.tokens(node) for node in nodes}
        bound = MOST_OVER_MEAN * sum(queued.values()) / max(1, len(queued)) + len(key.token_ids)
        return sorted(_by_key(name, queued), key=lambda node: queued[node] > bound)

    return TwoStep(LeastLoadedDecode(load).pick, order)


# Added to the lowest cost. Best value in simulations (docs/benchmarks/routing.md). A higher value
# keeps more prefixes in place but lengthens queues where one prefix dominates.
NEAR_TOKENS = 512


class PrefixAware:
    """Prefix-aware policy: the prefill node with the longest cached prefix, unless it is too busy.

    The cost of a node is its queued uncached tokens plus the uncached tokens of this prompt. Among
    the nodes with about the lowest cost, the one with the longest prefix is chosen. So a prompt
    waits for its cached prefix only if recomputation elsewhere would take about as long. A popular
    prefix does not overload one node: once its queue is longer than the prefix, the next prompt
    goes to another node, which then caches the prefix too. Equal nodes take turns, or are chosen by
    session.
    """

    def __init__(self, load: NodeLoad, prefixes: PrefixIndex) -> None:
        self._load = load
        self._prefixes = prefixes
        self._decode = LeastLoadedDecode(load)
        self._turns = RotatingOrder()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(choices)
        num_tokens = len(key.token_ids)
        nodes = [node.address for node in decode.prefill]
        if len(nodes) < 2:
            return PlacementDecision(decode.address, tuple(nodes), num_tokens)
        if key.session_id:
            nodes = _by_key(xxh3_64_intdigest(key.session_id.encode()), nodes)
        else:
            nodes = self._turns.rotated(nodes)
        prefixes = PromptPrefixes(key.token_ids, key.namespace)
        # The last token is always computed, for its logits.
        cached = [
            min(self._prefixes.cached_tokens(prefixes, node), num_tokens - 1) for node in nodes
        ]
        costs = [
            self._load.prefill.tokens(node) - has for node, has in zip(nodes, cached, strict=True)
        ]
        near = min(costs) + NEAR_TOKENS
        order = sorted(
            range(len(nodes)),
            key=lambda i: (0, -cached[i], costs[i]) if costs[i] <= near else (1, costs[i], 0),
        )
        first = order[0]
        self._prefixes.placed(prefixes, nodes[first])
        return PlacementDecision(
            decode.address, tuple(nodes[i] for i in order), num_tokens - cached[first]
        )


class RoutingPolicy(Protocol):
    """A routing policy, called once per request on the router's event loop. Must not block.

    The choices may differ at each call, because nodes join and leave.
    """

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        """Choose one of `choices`, which is not empty, and order its prefill nodes, best first."""
        ...


class _Inputs(NamedTuple):
    load: NodeLoad
    backlogs: NodeBacklogs
    prefixes: PrefixIndex
    rng: random.Random


_POLICIES: dict[str, Callable[[_Inputs], RoutingPolicy]] = {
    "round_robin": lambda given: RoundRobin(),
    "random": lambda given: random_nodes(given.rng),
    "power_of_two": lambda given: power_of_two(given.load, given.rng),
    "least_tokens": lambda given: least_tokens(given.load),
    "least_requests": lambda given: least_requests(given.load),
    "shortest_queue": lambda given: shortest_queue(given.load, given.backlogs),
    "prefix_aware": lambda given: PrefixAware(given.load, given.prefixes),
    "session_affinity": lambda given: SessionAffinity(given.load),
    "consistent_hash": lambda given: consistent_hash(given.load),
}
NAMES = tuple(_POLICIES)
USE_PREFIX_INDEX = frozenset({"prefix_aware"})  # policies that use the prefix index


def make_policy(
    name: str,
    load: NodeLoad,
    backlogs: NodeBacklogs,
    prefixes: PrefixIndex,
    rng: random.Random | None = None,
) -> RoutingPolicy:
    """Create a policy.

    Args:
        name: one of NAMES.
        load: load of the nodes. The caller charges each placement to it.
    """
    rng = rng or random.Random(secrets.randbits(64))  # virtual time makes `secrets` repeatable
    return _POLICIES[name](_Inputs(load, backlogs, prefixes, rng))

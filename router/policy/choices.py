"""Types shared by the cluster and its policy: the choices, and a placement."""

from collections.abc import Sequence

import msgspec

from common.requests.namespace import NO_ADAPTER, SHARED, AdapterId, Namespace


class PlacementKey(msgspec.Struct, frozen=True):
    """The parts of a request that decide its placement."""

    token_ids: Sequence[int]
    session_id: str = ""  # requests of a session belong together; "": no session
    namespace: Namespace = SHARED  # of prefix caches, which other namespaces cannot use
    adapter: AdapterId = NO_ADAPTER  # the decode node must have it


class PrefillChoice(msgspec.Struct, frozen=True):
    """A prefill node that a decode node can read from."""

    address: str
    path: str = ""  # as in LinkState
    gib_per_s: float = 0.0  # 0: not measured


class DecodeChoice(msgspec.Struct, frozen=True):
    """A decode node that accepts requests, as of its last Status."""

    address: str
    prefill: tuple[PrefillChoice, ...]  # empty if it prefills itself
    pages_total: int = 0  # 0: not reported
    pages_free: int = 0  # includes pages held only by the prefix cache
    page_size: int = 16
    adapters: frozenset[AdapterId] = frozenset()  # loaded on it


class PlacementDecision(msgspec.Struct, frozen=True):
    """The nodes chosen for a request, and the prompt tokens to compute."""

    decode: str
    prefill: tuple[str, ...]  # candidates in order of preference
    uncached_tokens: int  # prompt tokens for the first candidate to compute, as far as known

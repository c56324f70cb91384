"""Between the cluster and its policy: what there is to choose from, and what was chosen."""

from collections.abc import Sequence

import msgspec

from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.namespace import SHARED, Namespace


class PlacementKey(msgspec.Struct, frozen=True):
    """The part of a request that decides where it goes."""

    token_ids: Sequence[int]
    session_id: str = ""  # requests of one session belong together; "": of none
    namespace: Namespace = SHARED  # of prefix caches: what others have sent is of no use to it
    adapter: AdapterId = NO_ADAPTER  # which the decode node must have


class PrefillChoice(msgspec.Struct, frozen=True):
    """A prefill node that a decode node can read from."""

    address: str
    path: str = ""  # as in LinkState
    gib_per_s: float = 0.0  # 0: not measured


class DecodeChoice(msgspec.Struct, frozen=True):
    """A decode node that takes requests now, as it last said of itself."""

    address: str
    prefill: tuple[PrefillChoice, ...]  # empty where it prefills itself
    pages_total: int = 0  # 0: not told
    pages_free: int = 0  # those that the prefix cache alone holds are free
    page_size: int = 16
    adapters: frozenset[AdapterId] = frozenset()  # that it has


class Placement(msgspec.Struct, frozen=True):
    """Where one request goes, and what that costs."""

    decode: str
    prefill: tuple[str, ...]  # candidates in order of preference
    uncached_tokens: int  # of the prompt, for the first candidate to compute, as far as is known

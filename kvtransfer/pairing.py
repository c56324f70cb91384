"""Hello, the first message of a pair stream, and the check whether two nodes may pair. Its error
names every difference.

The fingerprint is a set of named strings, which the engine fills. This module only knows which
flags determine some of them.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from common.copy_map import NodeShape
from common.errors import LayoutMismatch
from common.limits import MAX_RANKS
from common.requests.namespace import WeightsId
from kvtransfer.backends.base import PoolRegion

PROTOCOL_VERSION = 11
_MAX_SHOWN = 200  # characters shown of text from a peer
_FLAGS = {"dtype": "--dtype", "quantize": "--quantize", "page_size": "--engine.cache.page-size"}
OTHER_WEIGHTS = "the node has other weights now"  # reason with which streams end on a change
_WEIGHTS = "weights"
_ARITHMETIC = "arithmetic"  # set only by nodes with engine.batch_invariant
_FOLLOWS = "kv_token_bytes"  # derived from dtype and others: named only if no flag explains it


class DataPath(msgspec.Struct, frozen=True):
    """One way to read the pages of one rank of the sender. The backend defines the description."""

    backend: str
    description: bytes
    rank: int = 0


class PairHello(msgspec.Struct, frozen=True, tag=True):
    """The first message in each direction. A producer offers paths, in its order of preference and
    described for this stream only. A consumer offers none.

    Attributes:
        regions: pages by rank.
        address: gRPC address of the sender.
        tp: tensor-parallel ranks of each stage.
        pp: pipeline stages.
        state_pages: pages of a request's recurrent state. Page ids are the same on all ranks.
    """

    instance: int  # random 64-bit number, new at each process start
    protocol_version: int
    fingerprint: dict[str, str]
    paths: tuple[DataPath, ...]
    regions: tuple[PoolRegion, ...]
    address: str
    tp: int = 1
    pp: int = 1
    state_pages: int = 0

    @classmethod
    def of(
        cls,
        instance: int,
        address: str,
        fingerprint: dict[str, str],
        regions: Sequence[PoolRegion],
        state_pages: int,
        num_stages: int = 1,
    ) -> "PairHello":
        """Return the Hello of a node, without paths.

        Args:
            regions: pages by rank.
        """
        return cls(
            instance=instance,
            protocol_version=PROTOCOL_VERSION,
            fingerprint=fingerprint,
            paths=(),
            regions=tuple(regions),
            address=address,
            tp=len(regions) // num_stages,
            pp=num_stages,
            state_pages=state_pages,
        )

    @property
    def peer(self) -> str:
        """Name of the sender in messages to users."""
        return self.address[:_MAX_SHOWN] or "the peer"

    @property
    def shape(self) -> NodeShape:
        return NodeShape(self.tp, self.pp)

    def same_layout(self, other: "PairHello") -> bool:
        """Return whether pages of equal ranks have the same layout on two nodes that may pair."""
        return self.shape == other.shape

    def with_weights(self, weights: WeightsId) -> "PairHello":
        fingerprint = {**self.fingerprint, _WEIGHTS: weights.hex()}
        return msgspec.structs.replace(self, fingerprint=fingerprint)


def compare(ours: PairHello, theirs: PairHello) -> None:
    """Check that two nodes may pair.

    Raises:
        LayoutMismatch: they may not. The message has one sentence for each difference.
    """
    differences = " ".join(_differences(ours, theirs))
    if differences:
        raise LayoutMismatch(f"{theirs.peer} cannot pair: {differences}")


def lasts(ours: PairHello, theirs: PairHello) -> bool:
    """Return whether a mismatch lasts until a node restarts. A difference in weights does not,
    because nodes can change weights while they run.
    """
    fingerprint = {**ours.fingerprint, _WEIGHTS: theirs.fingerprint.get(_WEIGHTS, "")}
    return any(_differences(msgspec.structs.replace(ours, fingerprint=fingerprint), theirs))


def _differences(ours: PairHello, theirs: PairHello) -> Iterator[str]:
    if ours.instance == theirs.instance:
        yield "It is this node itself."
    same_version = ours.protocol_version == theirs.protocol_version
    if not same_version:
        yield _sentence("protocol_version", ours.protocol_version, theirs.protocol_version)
    wrong = [*_wrong_ranks(theirs)] if same_version else []
    yield from wrong
    differing = _differing(ours.fingerprint, theirs.fingerprint)
    flags = [flag for field, flag in _FLAGS.items() if field in differing]
    for field in differing:
        if not (flags and field == _FOLLOWS):
            our, their = ours.fingerprint.get(field), theirs.fingerprint.get(field)
            yield _sentence(field, _shown(our), _shown(their))
    if _ARITHMETIC in ours.fingerprint.keys() ^ theirs.fingerprint.keys():
        yield "Start both with or without --engine.batch-invariant."
    if flags:
        yield f"Start both with the same {' and '.join(flags)}."
    if same_version and not (flags or wrong):
        yield from _page_differences(ours, theirs)


def _wrong_ranks(theirs: PairHello) -> Iterator[str]:
    """Yield the reasons why the ranks in a Hello are invalid."""
    num_ranks = len(theirs.regions)
    if not (1 <= theirs.tp * theirs.pp == num_ranks <= MAX_RANKS):
        yield (
            f"Its Hello is invalid: tp is {theirs.tp} and pp is {theirs.pp}, with pages of "
            f"{num_ranks} ranks. A node has 1 to {MAX_RANKS} ranks."
        )
    if len({region.num_pages for region in theirs.regions}) > 1:
        yield "Its Hello is invalid: its ranks have different numbers of pages."
    if any(theirs.state_pages > region.num_pages for region in theirs.regions):
        yield f"Its Hello is invalid: a state of {theirs.state_pages} pages exceeds its pool."
    if any(not 0 <= path.rank < num_ranks for path in theirs.paths):
        yield f"Its Hello is invalid: it has a data path of a rank outside [0, {num_ranks})."


def _page_differences(ours: PairHello, theirs: PairHello) -> Iterator[str]:
    """Yield the differences in page layout. It may differ if the numbers of ranks differ."""
    if not ours.same_layout(theirs):
        if bool(ours.state_pages) != bool(theirs.state_pages):
            yield _sentence("state_pages", ours.state_pages, theirs.state_pages)
        return
    if ours.state_pages != theirs.state_pages:
        yield _sentence("state_pages", ours.state_pages, theirs.state_pages)
    for rank, (our, their) in enumerate(zip(ours.regions, theirs.regions, strict=True)):
        if our.page_bytes != their.page_bytes:
            yield _sentence(f"page_bytes of rank {rank}", our.page_bytes, their.page_bytes)


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    fields = sorted(ours.keys() | theirs.keys())
    return [field for field in fields if ours.get(field) != theirs.get(field)]


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value[:_MAX_SHOWN])


def _sentence(field: str, ours: object, theirs: object) -> str:
    return f"{field} is {ours} here and {theirs} there."

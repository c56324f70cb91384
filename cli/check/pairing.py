"""Findings of `baton check` about two nodes: whether they can pair, and what each rank reads."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cli.check.findings import Finding, print_rows
from cli.check.sizes import RankSizes, layout_of, opened, rank_sizes, sentence
from common.config import DecodeConfig, EngineConfig, NodeConfig, PrefillConfig
from common.copy_map import NodeShape, RankPages, Slice, copy_map
from common.errors import ConfigError, LayoutMismatch
from engine.load import OpenedModel, layout_fields, model_fields
from engine.models.checkpoint import content
from engine.models.choice import stored_of
from kvtransfer.backends.base import PoolRegion
from kvtransfer.pairing import PairHello, compare

Reads = Sequence[Sequence[Slice]]  # by table, with the slices of the recurrent state last


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One of the two nodes."""

    name: str
    config: EngineConfig
    model: OpenedModel
    sizes: Sequence[RankSizes]
    pages: Sequence[RankPages]

    @classmethod
    def of(cls, name: str, node: NodeConfig) -> "_Side":
        """Describe a configured node. Raises ConfigError if it could not run."""
        config = node.engine
        model = opened(config)
        sizes = rank_sizes(config, model)
        ranks = NodeShape(config.parallel.tp, config.parallel.pp)
        pages = layout_of(config, model).pages_by_rank(ranks)
        return cls(name, config, model, sizes, pages)

    def hello(self, instance: int, weights: dict[str, str]) -> PairHello:
        """Return the node's Hello message, without the addresses of its pages."""
        whole = layout_of(self.config, self.model)
        fields = {**model_fields(self.config, self.model), **layout_fields(whole), **weights}
        num_pages = max(1, self.pages[0].state_pages)
        regions = [PoolRegion(0, each.page_bytes, num_pages) for each in self.pages]
        state_pages, num_stages = self.pages[0].state_pages, self.config.parallel.pp
        return PairHello.of(instance, self.name, fields, regions, state_pages, num_stages)

    def weights(self) -> dict[str, str]:
        """Read all weights, and return their part of the fingerprint."""
        stored = stored_of(self.model.loadable, self.model.directory)
        return {"weights": content(stored).hex()}


@dataclass(slots=True, eq=False)
class Pair:
    """A prefill node, a decode node, and the bytes that the decode node reads.

    Attributes:
        findings: whether they can pair, and the sizes of their ranks.
        producers, consumers: sizes of the ranks of the prefill node and of the decode node.
        reads: slices by rank of the decode node. Empty: they cannot pair.
        windows: window of each table, in tokens.
    """

    findings: list[Finding] = field(default_factory=list)
    producers: Sequence[RankSizes] = ()
    consumers: Sequence[RankSizes] = ()
    reads: Sequence[Reads] = ()
    windows: Sequence[int | None] = ()

    @classmethod
    def of(cls, prefill: PrefillConfig, decode: DecodeConfig, names: Sequence[str]) -> "Pair":
        """Compare two nodes as they do when they connect.

        Args:
            names: names of the prefill node and of the decode node.
        """
        pair = cls()
        pair.findings += _settings(prefill, decode)
        sides: list[_Side] = []
        for name, node in zip(names, (prefill, decode), strict=True):
            try:
                sides.append(_Side.of(name, node))
            except (ConfigError, LayoutMismatch) as error:
                pair.findings.append(Finding(name, "fails", str(error)))
            else:
                pair.findings.append(Finding(name, "ok", sentence(sides[-1].sizes)))
        if len(sides) < len(names):
            return pair
        producer, consumer = sides
        pair.producers, pair.consumers = producer.sizes, consumer.sizes
        pair.windows = layout_of(consumer.config, consumer.model).windows
        try:
            _compare(producer, consumer)
            pair.reads = [_reads(rank, producer, consumer) for rank in range(len(consumer.pages))]
        except LayoutMismatch as error:
            pair.findings.append(Finding("pair", "fails", str(error)))
        else:
            ranks = f"{len(producer.pages)} and {len(consumer.pages)} ranks"
            pair.findings.append(Finding("pair", "ok", f"the nodes can pair, with {ranks}"))
        return pair

    def plain(self) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": {
                "prefill": [asdict(each) for each in self.producers],
                "decode": [asdict(each) for each in self.consumers],
            },
            "reads": [
                {"rank": rank, "table": self._table(table), **each._asdict()}
                for rank, reads in enumerate(self.reads)
                for table, slices in enumerate(reads)
                for each in slices
            ],
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield what each rank reads from each rank of the prefill node, by table."""
        for rank, reads in enumerate(self.reads):
            for table, slices in enumerate(reads):
                for producer in sorted({each.producer_rank for each in slices}):
                    own = [each for each in slices if each.producer_rank == producer]
                    name, window = self._table(table), None
                    if table < len(self.windows):
                        window = self.windows[table]
                    seen = "" if window is None else f", {window} tokens seen"
                    yield str(rank), str(producer), f"{name}{seen}", *_described(own)

    def _table(self, number: int) -> str:
        return f"table {number}" if number < len(self.windows) else "state"

    def print(self) -> None:
        """Print what is read, or nothing if the nodes cannot pair."""
        columns = ("rank", "reads rank", "part", "bytes there", "bytes here", "size")
        if self.reads:
            print_rows("reads of the decode node", columns, self.rows())


def _settings(prefill: PrefillConfig, decode: DecodeConfig) -> Iterator[Finding]:
    """Check the settings that a Hello message does not contain."""
    if decode.mode == "colocated":
        yield Finding("mode", "fails", "a decode node in mode colocated reads from no prefill node")
    backends = {prefill.transfer.backend, decode.transfer.backend}
    if backends == {"nixl", "tcp"}:
        remark = (
            f"transfer.backend: the prefill node has only {prefill.transfer.backend}, and the "
            f"decode node only {decode.transfer.backend}"
        )
        yield Finding("KV transfer", "fails", remark)


def _compare(producer: _Side, consumer: _Side) -> None:
    """Raise LayoutMismatch as the decode node does when the prefill node connects."""
    same = producer.model.directory.resolve() == consumer.model.directory.resolve()
    theirs, ours = ({} if same else side.weights() for side in (producer, consumer))
    compare(consumer.hello(1, ours), producer.hello(2, theirs))


def _reads(rank: int, producer: _Side, consumer: _Side) -> Reads:
    """Return what a rank reads. Raise LayoutMismatch if the producer lacks it."""
    mine = consumer.pages[rank]
    if len(producer.pages) != len(consumer.pages):
        return copy_map(rank, mine, producer.pages)
    # With equal numbers of ranks, each rank reads whole pages of its counterpart.
    whole = [Slice(rank, 0, 0, 0, 0, mine.page_bytes)]
    state = [Slice(rank, page, 0, page, 0, mine.page_bytes) for page in range(mine.state_pages)]
    return [*([whole] * (len(mine.atoms) - 1)), state]


def _described(slices: Sequence[Slice]) -> tuple[str, str, str]:
    """Return the position of the bytes, their destination, and their number, as text."""
    num_bytes = f"{sum(each.size for each in slices)}"
    if len(slices) > 1:
        there, here = (
            len({getattr(each, page) for each in slices}) for page in ("source_page", "page")
        )
        parts = f"{len(slices)} parts"
        return f"{parts} of {there} pages", f"{parts} of {here} pages", num_bytes
    (one,) = slices
    return (
        f"{one.source} to {one.source + one.size - 1}{_of_page(one.source_page)}",
        f"{one.at} to {one.at + one.size - 1}{_of_page(one.page)}",
        num_bytes,
    )


def _of_page(page: int) -> str:
    return f" of page {page}" if page else ""

"""The map of a hand-off between ranks: bytes that a consumer rank reads from producer ranks.

A rank has some heads of some layers, packed in its own page layout. The map is computed from the
page contents of both sides. The engine describes pages and the transfer reads by the map, without
importing each other, so the shared types are here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import LayoutMismatch
from common.limits import MAX_RANKS


class NodeShape(NamedTuple):
    """The ranks of a node: `tp` in each of `pp` stages."""

    tp: int = 1
    pp: int = 1


ONE_RANK = NodeShape()


class AtomKey(NamedTuple):
    """The name of an atom, equal on all ranks. `layer` and `head` are numbers of the model."""

    kind: str
    layer: int
    head: int


class Atom(NamedTuple):
    """Bytes that no rank splits, such as one head of one layer: [at, at + size) of a page.

    Attributes:
        page: index among the state's pages. 0 in tables, where one page is read into one page.
    """

    page: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class RankPages:
    """Contents of one rank's pages.

    Attributes:
        layers: layers of the rank's pipeline stage.
        atoms: by table, with those of the recurrent state last.
    """

    page_bytes: int
    state_pages: int
    layers: range
    atoms: tuple[Mapping[AtomKey, Atom], ...]


class Slice(NamedTuple):
    """Bytes [source, source + size) of a producer rank's page, read to a page from `at` on.

    Attributes:
        source_page, page: indices among the state's pages. 0 in tables.
    """

    producer_rank: int
    source_page: int
    source: int
    page: int
    at: int
    size: int


def copy_map(
    consumer_rank: int, mine: RankPages, producers: Sequence[RankPages]
) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices that a consumer rank reads, by table, with those of the state last.

    If n producers have an atom, the one with index consumer_rank % n among them is read. Slices are
    in the order of `mine`. Adjacent ones are joined, also across alignment, so that equal ranks
    read a page as one slice.

    Raises:
        LayoutMismatch: the producers lack bytes that this rank reads, or the numbers are invalid.
    """
    if not (0 <= consumer_rank < MAX_RANKS and 1 <= len(producers) <= MAX_RANKS):
        raise LayoutMismatch(
            f"rank {consumer_rank} cannot read from {len(producers)} ranks: a node has at most "
            f"{MAX_RANKS}"
        )
    for pages in (mine, *producers):
        _check(pages, len(mine.atoms))
    _check_stages(mine, producers)
    return tuple(
        tuple(_joined(_slices(consumer_rank, atoms, [each.atoms[group] for each in producers])))
        for group, atoms in enumerate(mine.atoms)
    )


def _check(pages: RankPages, num_groups: int) -> None:
    if len(pages.atoms) != num_groups:
        raise LayoutMismatch(
            f"{len(pages.atoms) - 1} tables of pages at the producer, {num_groups - 1} here"
        )
    for group, atoms in enumerate(pages.atoms):
        num_pages = pages.state_pages if group == num_groups - 1 else 1
        for key, (page, at, size) in atoms.items():
            if not (0 <= page < num_pages and 0 <= at < at + size <= pages.page_bytes):
                raise LayoutMismatch(
                    f"{key.kind} of layer {key.layer}, head {key.head}: {size} bytes at {at} of "
                    f"page {page} are outside {num_pages} pages of {pages.page_bytes} bytes"
                )


def _check_stages(mine: RankPages, producers: Sequence[RankPages]) -> None:
    """Raise LayoutMismatch if stages overlap without being equal and there are several tables."""
    num_tables = len(mine.atoms) - 1
    for layers in dict.fromkeys(each.layers for each in producers):
        apart = layers.stop <= mine.layers.start or mine.layers.stop <= layers.start
        if num_tables > 1 and layers != mine.layers and not apart:
            raise LayoutMismatch(
                f"the producer has a stage of layers {layers.start} to {layers.stop - 1}, this "
                f"node {mine.layers.start} to {mine.layers.stop - 1}: different stages need a "
                f"model with one table of pages, and this model has {num_tables}"
            )


def _slices(
    consumer_rank: int, mine: Mapping[AtomKey, Atom], producers: Sequence[Mapping[AtomKey, Atom]]
) -> Iterator[Slice]:
    """Yield one slice for each atom, in the order of this rank's pages."""
    holders: dict[AtomKey, list[int]] = {key: [] for key in mine}
    for producer, atoms in enumerate(producers):
        for key in atoms.keys() & mine.keys():
            holders[key].append(producer)
    for key, (page, at, size) in sorted(mine.items(), key=lambda each: each[1]):
        having = holders[key]
        if not having:
            raise LayoutMismatch(
                f"no rank of the producer has {key.kind} of layer {key.layer}, head {key.head}"
            )
        producer = having[consumer_rank % len(having)]
        source = producers[producer][key]
        if source.size != size:
            raise LayoutMismatch(
                f"{key.kind} of layer {key.layer}, head {key.head}: {source.size} bytes at the "
                f"producer, {size} here"
            )
        yield Slice(producer, source.page, source.at, page, at, size)


def _joined(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Join consecutive slices that have the same distance on both sides."""
    last: Slice | None = None
    for each in slices:
        if last is None:
            last = each
        elif (last.producer_rank, last.source_page, last.page, each.at - last.at) == (
            each.producer_rank,
            each.source_page,
            each.page,
            each.source - last.source,
        ):
            last = last._replace(size=each.at + each.size - last.at)
        else:
            yield last
            last = each
    if last is not None:
        yield last

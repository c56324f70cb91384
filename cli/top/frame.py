"""One frame of `baton top`: renders a cluster and its rates with rich. Pure functions."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from rich.console import Group, RenderableType
from rich.text import Text

from cli.operating.command import safe, size
from protos.router_pb2 import (
    ClusterNode,
    GetClusterResponse,
    LatencySummary,
    LinkState,
    RankState,
    RouterState,
)

WINDOW_S = 4.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float  # uptime of the router
    values: Mapping[str, int]


@dataclass(slots=True)
class _Book:
    """The last samples of one node instance, oldest first."""

    instance: int
    samples: deque[_Sample] = field(default_factory=deque)


class Rates:
    """Rates by node address. A restarted node counts from zero, so its samples are dropped."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def take(self, nodes: Sequence[ClusterNode]) -> None:
        """Add a sample of every node. Nodes missing from `nodes` are dropped."""
        self._books = {
            node.address: self._taken(node) for node in nodes if node.state != "unreachable"
        }

    def of(self, address: str, counter: str) -> float | None:
        """Return the recent rate of a counter, or of "steps". None: not known yet."""
        book = self._books.get(address)
        if book is None or len(book.samples) < 2:
            return None
        first, last = book.samples[0], book.samples[-1]
        grown = last.values.get(counter, 0) - first.values.get(counter, 0)
        return max(0.0, grown / (last.at_s - first.at_s))

    def total(self, addresses: Sequence[str], counter: str) -> float | None:
        """Return the sum of the known rates, or None if none is known."""
        known = [rate for a in addresses if (rate := self.of(a, counter)) is not None]
        return sum(known) if known else None

    def _taken(self, node: ClusterNode) -> _Book:
        book = self._books.get(node.address)
        # A restarted router has another clock.
        if (
            book is None
            or book.instance != node.instance_id
            or (book.samples and book.samples[-1].at_s > node.seen_s)
        ):
            book = _Book(node.instance_id)
        samples = book.samples
        if not samples or samples[-1].at_s < node.seen_s:
            samples.append(_Sample(node.seen_s, {**node.counters, "steps": node.steps}))
        while len(samples) > 2 and samples[1].at_s <= node.seen_s - WINDOW_S:
            samples.popleft()
        return book


# Holders of pages in the order of the bar. Without colours, the signs distinguish them.
_HOLDERS = {
    "request": ("█", "blue"),
    "step": ("▓", "magenta"),
    "read": ("▒", "cyan"),
    "publication": ("▞", "yellow"),
    "copy": ("▚", "red"),
    "cache": ("░", "bright_black"),
    "free": ("·", "bright_black"),
}
# All other states are red.
_STATES = {
    "ready": "green",
    **dict.fromkeys(("not ready", "starting", "paused", "draining"), "yellow"),
}
_PATHS = {
    "nvlink": "green",
    "cuda_ipc": "cyan",
    "rdma": "magenta",
    "cma": "blue",
    "tcp": "yellow",
}
# Widths in terminal cells.
_GAP = 2  # between columns
_STATE_WIDTH, _USED_WIDTH = 11, 4
_NARROWEST_BAR, _WIDEST_BAR = 8, 24
_FIXED_WIDTH = _STATE_WIDTH + _NARROWEST_BAR + _USED_WIDTH + 3 * _GAP  # always shown
_QUEUES_WIDTH = 40  # at least
_FIRST_NUMBER = 3  # the column of "used"
_NARROWEST_ADDRESS = 12
_FEWEST_LINKS = 4  # minimum number of lines for links, on any terminal


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    counter: str


# In display order. On a narrow terminal the last ones are left out first.
_RATES = (
    _Column("tok/s", 6, "generated_tokens"),
    _Column("prompt/s", 8, "prompt_tokens"),
    _Column("steps/s", 7, "steps"),
    _Column("hand-offs/s", 11, "handoffs_completed"),
)


def frame(
    address: str,
    cluster: GetClusterResponse,
    rates: Rates,
    *,
    width: int,
    height: int | None = None,
) -> RenderableType:
    """Render the cluster.

    Args:
        width: terminal cells in a line. Columns that do not fit are left out.
        height: available lines. None: any number. If there are too many ranks and links, they are
            summed up.
    """
    nodes = list(cluster.nodes)
    parts: list[RenderableType] = [
        _headline(address, cluster.router, width),
        *_model_lines(cluster.router, width),
        _totals(nodes, cluster.router, rates),
        _requests(cluster.router, width),
        Text(),
        *_node_lines(nodes, rates, width),
    ]
    if any(node.pages for node in nodes):
        parts += [Text(), _legend()]
    if split := [node for node in nodes if node.ranks]:
        num_ranks = sum(len(node.ranks) for node in split)
        fit = height is None or num_ranks <= height - len(parts) - 2 - _FEWEST_LINKS
        parts += [Text(), *_rank_lines(split, width, each=fit)]
    links = [(link, node.address) for node in nodes for link in node.links]
    if links:
        room = None if height is None else max(_FEWEST_LINKS, height - len(parts) - 2)
        parts += [Text(), *_link_lines(links, room, width, {n.address: n for n in nodes})]
    return Group(*parts)


def short(value: float | None) -> str:
    """Format with at most three significant digits, with k and M."""
    match value:
        case None:
            return "-"
        case _ if value >= 999_500:
            return f"{value / 1e6:.3g}M"
        case _ if value >= 9_995:
            return f"{value / 1e3:.3g}k"
        case _ if value >= 99.5 or value == int(value):
            return f"{value:.0f}"
    return f"{value:.3g}"


def _headline(address: str, router: RouterState, width: int) -> Text:
    state = router.state if not router.reason else f"{router.state}: {router.reason}"
    missing = f", {router.silent_processes} of {router.processes} router processes silent"
    line = Text.assemble(
        ("baton top", "bold"),
        f"  {safe(address)} ",
        (safe(state), _STATES.get(router.state, "red")),
        (missing if router.silent_processes else "", "yellow"),
        (f"  {safe(router.model)}  up {_age(router.uptime_s)}", "bright_black"),
    )
    line.truncate(width, overflow="ellipsis")
    return line


def _model_lines(router: RouterState, width: int) -> Iterator[Text]:
    """Yield the state of each model, if there are several."""
    for model in router.models if len(router.models) > 1 else ():
        state = f"{model.state}: {model.reason}" if model.reason else model.state
        line = Text.assemble(
            (f"{safe(model.name)} ", "bold"),
            (safe(state), _STATES.get(model.state, "red")),
            (f"  in-flight {model.live_requests}/{model.max_requests}", "bright_black"),
        )
        line.truncate(width, overflow="ellipsis")
        yield line


def _totals(nodes: Sequence[ClusterNode], router: RouterState, rates: Rates) -> Text:
    everyone = [node.address for node in nodes]
    consumers = [node.address for node in nodes if node.role == "decode"]
    ready = sum(node.state == "ready" for node in nodes)
    shown = {
        "nodes": f"{ready}/{len(nodes)}",
        "in-flight": f"{router.live_requests}/{router.max_requests}",
        "tok/s": short(rates.total(everyone, "generated_tokens")),
        "prompt/s": short(rates.total(everyone, "prompt_tokens")),
        "hand-offs/s": short(rates.total(consumers, "handoffs_completed")),
    }
    return _figures(shown)


def _requests(router: RouterState, width: int) -> Text:
    """Return the requests of the last minute."""
    recent = router.recent
    line = _figures(
        {
            "TTFT p50/p99": _percentiles(recent.ttft),
            "ITL": _percentiles(recent.itl),
            "rejected (429)": short(recent.rejected_requests),
            "errors": short(recent.failed_requests),
        }
    )
    line.truncate(width, overflow="ellipsis")
    return line


def _percentiles(latency: LatencySummary) -> str:
    if not latency.count:
        return "-"
    return "/".join(f"{short(each * 1e3)}" for each in (latency.p50_s, latency.p99_s)) + " ms"


def _figures(shown: Mapping[str, str]) -> Text:
    parts = [((f"{name} ", "bright_black"), (value, "bold")) for name, value in shown.items()]
    return Text("   ").join(Text.assemble(*part) for part in parts)


def _node_lines(nodes: Sequence[ClusterNode], rates: Rates, width: int) -> Iterator[Text]:
    longest = max((len(node.address) for node in nodes), default=0)
    address_width = max(len("node"), min(longest, max(width // 3, 15), width - _FIXED_WIDTH))
    columns, bar_width, queues_width = _fitting(width, address_width)
    widths = [address_width, _STATE_WIDTH, bar_width, _USED_WIDTH, *(c.width for c in columns)]
    titles = ["node", "state", "pages", "used", *(column.title for column in columns)]
    beside = [Text("queues")] if queues_width else []
    yield from _table([[*map(Text, titles), *beside]], [*widths, queues_width])
    models = list(dict.fromkeys(node.served_model for node in nodes))
    for model, role in product(models, ("prefill", "decode", "encode")):
        of_role = [node for node in nodes if (node.served_model, node.role) == (model, role)]
        if of_role:
            head = Text(role if len(models) == 1 else f"{safe(model)} {role}", "bold")
            head.truncate(width, overflow="ellipsis")
            yield head
        for node in of_role:
            cells = [
                Text(safe(node.address)),
                Text(safe(node.state), _STATES.get(node.state, "red")),
                _bar(node, bar_width),
                Text(_used(node)),
                *(Text(short(rates.of(node.address, column.counter))) for column in columns),
            ]
            queues = _queues(node)
            if queues_width:
                yield _line([*cells, queues], [*widths, queues_width])
                continue
            yield _line(cells, widths)
            if queues.plain:
                yield _line([Text(), queues], [0, width - _GAP])


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Align words to the left, and numbers to the right."""
    line = Text(no_wrap=True)
    for index, (cell, width) in enumerate(zip(cells, widths, strict=False)):
        number = _FIRST_NUMBER <= index < _FIRST_NUMBER + 1 + len(_RATES)
        cell.truncate(width, overflow="ellipsis")
        cell.align("right" if number else "left", width)
        line.append_text(cell).append(" " * _GAP)
    line.rstrip()
    return line


def _table(rows: Iterable[Sequence[Text]], widths: Sequence[int]) -> Iterator[Text]:
    """Yield the lines of a table. The first row has the titles."""
    for index, row in enumerate(rows):
        line = _line(row, widths)
        if index == 0:
            line.stylize("bright_black")
        yield line


def _fitting(width: int, address_width: int) -> tuple[Sequence[_Column], int, int]:
    """Return the rate columns that fit, the width of the bar, and the width for the queues.

    A queue width of 0 means that the queues need a separate line.
    """
    left = width - address_width - _FIXED_WIDTH
    columns: list[_Column] = []
    for column in _RATES:
        if left < column.width + _GAP:
            break
        columns.append(column)
        left -= column.width + _GAP
    beside = left >= _QUEUES_WIDTH + _GAP
    if beside:
        left -= _QUEUES_WIDTH + _GAP
    bar_width = min(_WIDEST_BAR, _NARROWEST_BAR + max(0, left))
    left -= bar_width - _NARROWEST_BAR
    return columns, bar_width, _QUEUES_WIDTH + left if beside else 0


def _bar(node: ClusterNode, width: int) -> Text:
    """Draw one cell for every holder of pages, and the other cells by share."""
    total = sum(node.pages.values())
    if not total:
        return Text("?" * width, "bright_black")
    bar = Text()
    done, cells = 0, 0
    for holder, (sign, colour) in _HOLDERS.items():
        number = node.pages.get(holder, 0)
        done += number
        until = width if holder == "free" else round(done / total * width)
        if number and holder != "free":
            until = max(until, cells + 1)
        bar.append(sign * (min(until, width) - cells), colour)
        cells = max(cells, min(until, width))
    return bar


def _used(node: ClusterNode) -> str:
    """Return the share of pages that cannot be allocated: neither free nor only cached."""
    total = sum(node.pages.values())
    loose = node.pages.get("free", 0) + node.pages.get("cache", 0)
    return f"{1 - loose / total:.0%}" if total else "-"


def _queues(node: ClusterNode) -> Text:
    full = [f"{safe(name)} {number}" for name, number in sorted(node.queues.items()) if number]
    if node.group:
        full.insert(0, f"group {safe(node.group)} rank {node.group_rank}")
    retractions = node.counters.get("retractions", 0)
    line = Text("  ".join(full))
    if retractions:
        line.append(f"{'  ' if full else ''}{short(retractions)} retractions", "yellow")
    wrong = node.counters.get("canaries/failed", 0)
    if wrong:
        line.append(f"{'  ' if line else ''}{short(wrong)} canaries failed", "red")
    return line


def _legend() -> Text:
    parts = [
        Text.assemble((f"{sign} ", colour), (holder, "bright_black"))
        for holder, (sign, colour) in _HOLDERS.items()
    ]
    return Text("  ").join(parts)


def _rank_lines(nodes: Sequence[ClusterNode], width: int, *, each: bool) -> Iterator[Text]:
    """Yield a line for each rank, or for each node. Columns that do not fit are left out."""
    groups = [
        (node.address, ranks)
        for node in nodes
        for ranks in ([[rank] for rank in node.ranks] if each else [list(node.ranks)])
    ]
    columns = [[name, *(shown(ranks) for _, ranks in groups)] for name, shown in _RANK_COLUMNS]
    for name in ("device", "pid", "memory"):
        if width - sum(max(map(len, column)) + _GAP for column in columns) < _NARROWEST_ADDRESS:
            columns = [column for column in columns if column[0] != name]
    columns.insert(0, ["ranks", *(safe(address) for address, _ in groups)])
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(1, min(widths[0], width - sum(widths[1:]) - _GAP * len(widths[1:])))
    return _table([[*map(Text, row)] for row in zip(*columns, strict=True)], widths)


def _span(values: Sequence[int], shown: Callable[[int], str]) -> str:
    low, high = min(values), max(values)
    return shown(low) if low == high else f"{shown(low)} … {shown(high)}"


def _one(ranks: Sequence[RankState], shown: Callable[[RankState], int], several: str) -> str:
    return str(shown(ranks[0])) if len(ranks) == 1 else several


# Columns after the address.
_RANK_COLUMNS: Sequence[tuple[str, Callable[[Sequence[RankState]], str]]] = (
    ("rank", lambda ranks: _one(ranks, lambda rank: rank.rank, f"all {len(ranks)}")),
    ("pid", lambda ranks: _one(ranks, lambda rank: rank.pid, "")),
    ("device", lambda ranks: safe(", ".join(sorted({rank.device for rank in ranks})))),
    ("memory", lambda ranks: _span([rank.memory_bytes for rank in ranks], size)),
    ("steps behind", lambda ranks: _span([rank.steps_behind for rank in ranks], str)),
)


def _link_lines(
    links: Sequence[tuple[LinkState, str]],
    room: int | None,
    width: int,
    nodes: Mapping[str, ClusterNode],
) -> Iterator[Text]:
    """Yield a line for each link and each of its members.

    If these are more than `room` lines, yield one for each link, or else one for each path.
    """
    rows = [(Text("links"), Text("path"), Text("GB/s"))]

    def add(what: str, path: str, *gib_per_s: float) -> None:
        speeds = " … ".join(short(each * 2**30 / 1e9) for each in gib_per_s)
        rows.append((Text(what), Text(safe(path), _PATHS.get(path, "")), Text(speeds)))

    if room is None or len(links) <= room:
        whole = room is None or sum(1 + len(link.members) for link, _ in links) <= room
        for link, consumer in links:
            ends = f"{safe(link.peer)} → {safe(consumer)}{_ranks(nodes, link.peer, consumer)}"
            add(ends, link.path, link.gib_per_s)
            for each in link.members if whole else ():
                add(f"  rank {each.producer_rank} → rank {each.rank}", each.path, each.gib_per_s)
    else:
        for path in sorted({link.path for link, _ in links}):
            speeds = [link.gib_per_s for link, _ in links if link.path == path]
            add(f"{len(speeds)} links", path, min(speeds), max(speeds))
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    widths[0] = max(1, min(widths[0], width - widths[1] - widths[2] - 2 * _GAP))
    return _table(rows, widths)


def _ranks(nodes: Mapping[str, ClusterNode], producer: str, consumer: str) -> str:
    """Return the rank numbers of both ends of a link, if one has several."""
    ends = [nodes.get(each) for each in (producer, consumer)]
    if not any(end.ranks for end in ends if end is not None):
        return ""
    counts = [
        "?" if end is None or end.state == "unreachable" else len(end.ranks) or 1 for end in ends
    ]
    return f" ({counts[0]} → {counts[1]} ranks)"


def _age(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f} d {hours % 24:.0f} h"
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min" if minutes else f"{seconds:.0f} s"

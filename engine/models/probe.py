"""A self-test for batch invariance: whether a model computes equal bits in every kind of step.

It computes some tokens of a request alone, and again in chunks, together with other requests and as
a row with drafts. The tokens are given, so nothing is sampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from common.page_tables import PageTables
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import NO_TABLE, KVLayout
from engine.models.blocks.attention import AttentionBlock
from engine.models.blocks.delta_net import DeltaNetBlock
from engine.models.blocks.experts import DenseBlock, ExpertsBlock
from engine.models.blocks.latent import LatentAttentionBlock
from engine.models.blocks.layer import LateStates, Layer
from engine.models.linear import Linear
from engine.models.model import Model
from engine.ranks import Group
from kernels.narrow import as_stored

# The products of each supported block in the order of computation: attribute, name of the operation
# before, own name.
PRODUCTS: Mapping[type, Sequence[tuple[str, str, str]]] = {
    AttentionBlock: (("qkv", "input_layernorm", "qkv_proj"), ("output", "attention", "o_proj")),
    LatentAttentionBlock: (
        ("down", "input_layernorm", "kv_a_proj"),
        ("query_up", "q_a_layernorm", "q_b_proj"),
        ("output", "attention", "o_proj"),
    ),
    DeltaNetBlock: (
        ("projection", "input_layernorm", "in_proj"),
        ("output", "delta rule", "out_proj"),
    ),
    DenseBlock: (
        ("gate_up", "norm before the net", "gate_up_proj"),
        ("down", "activation", "down_proj"),
    ),
    ExpertsBlock: (),
}
_NUM_PROMPT = 70  # more than a block of keys in the attention kernel
_NUM_TOKENS = _NUM_PROMPT + 3
_PROBED = 0  # the request whose bits are compared
_OTHERS = range(1, 9)


class _Row(NamedTuple):
    """Tokens [start, end) of a request in one step."""

    request: int
    start: int
    end: int


def _beside(row: _Row, start: int, end: int) -> list[_Row]:
    """Return a step with a row and the same tokens of all other requests. Rows of one token are
    last."""
    others = [_Row(request, start, end) for request in _OTHERS]
    before = len(others) // 2 if end - start > 1 or row.end - row.start == 1 else 0
    return [*others[:before], row, *others[before:]]


_ALONE = (
    [_Row(_PROBED, 0, _NUM_PROMPT)],
    *([_Row(_PROBED, token, token + 1)] for token in range(_NUM_PROMPT, _NUM_TOKENS)),
)
_BESIDE_OTHERS = (
    [_Row(_PROBED, 0, 37)],
    _beside(_Row(_PROBED, 37, _NUM_PROMPT), 0, 2),
    _beside(_Row(_PROBED, _NUM_PROMPT, _NUM_PROMPT + 1), 2, 3),
    _beside(_Row(_PROBED, _NUM_PROMPT + 1, _NUM_TOKENS), 3, 4),
)


def differing_operation(model: Model, layout: KVLayout) -> str:
    """Return the name of the first operation whose bits differ between the two ways, or "". All
    ranks of a node call this at the same time.

    Args:
        layout: layout of this rank's pages.
    """
    with torch.inference_mode():
        found = _first_difference(model, layout, traced=False)
        group = model.layers[0].group if model.layers else None
        if not _in_any_rank(found, group):
            return ""
        first = _first_difference(model, layout, traced=True)
        return first or f"the compiled layers, seen in {found or 'another rank'}"


def _in_any_rank(found: str, group: Group | None) -> bool:
    differs = torch.tensor([float(bool(found))])
    return bool((differs if group is None else group.all_reduce(differs)).any())


def _first_difference(model: Model, layout: KVLayout, *, traced: bool) -> str:
    alone, beside = (_computed(model, layout, steps, traced) for steps in (_ALONE, _BESIDE_OTHERS))
    return next((name for name, bits in alone.items() if beside[name] != bits), "")


class _Trace:
    """Records the bits of the probed tokens, by operation in the order of computation.

    It replaces the adapters, which get the input and the output of each product, and adds nothing.

    Attributes:
        bits: hashes by token.
    """

    def __init__(self, model: Model) -> None:
        self.bits: dict[str, dict[int, int]] = {}
        self._names = dict(_named_products(model.layers))
        self._places: Mapping[int, int] = {}

    def begin(self, places: Mapping[int, int]) -> None:
        """Begin a step.

        Args:
            places: place of each probed token in the step.
        """
        self._places = places

    def add(self, product: Linear, x: Tensor, y: Tensor) -> None:
        if product in self._names:
            before, name = self._names[product]
            self.keep(before, self._places, x)
            self.keep(name, self._places, y)

    def keep(self, name: str, places: Mapping[int, int], rows: Tensor) -> None:
        """Record the bits of the tokens whose rows are at these places."""
        kept, rows = self.bits.setdefault(name, {}), as_stored(rows)
        for token, place in places.items():
            row = rows[place].contiguous().view(torch.uint8)
            kept[token] = hash(row.cpu().numpy().tobytes())


def _named_products(layers: Sequence[Layer]) -> Iterator[tuple[Linear, tuple[str, str]]]:
    """Yield each product of the layers except experts, with the names of the operation before it
    and of itself. The operation after the experts shows their difference."""
    of_experts = ""
    for number, layer in enumerate(layers):
        ffn, where = layer.ffn, f"of layer {number}"
        yield from _products_of(layer.mixer, where, of_experts)
        yield from _products_of(ffn, where)
        of_experts = ""
        if isinstance(ffn, ExpertsBlock):
            of_experts = _experts(number)
            yield from _products_of(ffn.shared, f"of the shared expert of layer {number}")


def _products_of(
    block: object, where: str, first: str = ""
) -> Iterator[tuple[Linear, tuple[str, str]]]:
    """Yield the products of a block. `first`: name of the operation before the first one. Empty: as
    in PRODUCTS."""
    for attribute, before, name in PRODUCTS.get(type(block), ()):
        if (product := getattr(block, attribute)) is not None:
            yield product, (first or f"{before} {where}", f"{name} {where}")
        first = ""


def _experts(number: int) -> str:
    return f"the experts of layer {number}"


def _computed(
    model: Model, layout: KVLayout, steps: Sequence[Sequence[_Row]], traced: bool
) -> Mapping[str, Mapping[int, int]]:
    """Compute steps with pages of their own. Return the bits of the probed tokens by operation."""
    requests, trace = 1 + len(_OTHERS), _Trace(model)
    tables, pages = layout.tables, -(-_NUM_TOKENS // layout.page_size)
    num_pages = requests * tables.num_tables * pages
    pool = KVPool(layout, num_pages + requests * tables.state_pages, model.device)
    states = torch.arange(num_pages, pool.num_pages, dtype=torch.int32)
    states = states.view(requests, tables.state_pages)
    probed = states[_PROBED : _PROBED + 1].to(model.device)
    generator = torch.Generator().manual_seed(0)
    shape = requests, _NUM_TOKENS
    tokens = torch.randint(model.spec.vocabulary_size, shape, generator=generator)
    future = torch.zeros(requests, dtype=torch.int32, device=model.device)
    after_experts = any(isinstance(layer.ffn, ExpertsBlock) for layer in model.layers[-1:])
    norm = _experts(len(model.layers) - 1) if after_experts else "the norm before lm_head"
    for rows in steps:
        host = _batch(rows, tokens.int(), states, tables, pages)
        columns = [column.to(model.device) for column in host.columns()]
        batch = ForwardBatch.of(columns, host.num_decodes, host.seen, host.extends)
        counts = torch.diff(batch.query_starts).tolist()
        owners = [*chain(*([row.request] * n for row, n in zip(rows, counts, strict=True)))]
        positions = batch.positions.tolist()
        own = {positions[i]: i for i, owner in enumerate(owners) if owner == _PROBED}
        trace.begin(own)
        late = LateStates()
        hidden = model.forward(batch, pool, future, trace if traced else None, late)
        if _has_drafts(rows):
            num_drafted = len(batch.token_ids) - batch.num_decodes
            late.write(batch.states_after(torch.diff(batch.query_starts)), num_drafted)
        chosen = {place: i for i, place in enumerate(batch.sampled.tolist())}
        # Tokens from the last prompt token on have logits in both ways.
        sampled = {token: chosen[place] for token, place in own.items() if token >= _NUM_PROMPT - 1}
        trace.keep(norm, sampled, hidden)
        trace.keep("lm_head", sampled, model.logits(hidden))
    for layer, (view, table) in enumerate(zip(pool.layers, pool.tables, strict=True)):
        for cells in pool.cells[layer].values():
            state = cells.read(probed)
            trace.keep(f"the state of layer {layer}", {_NUM_TOKENS - 1: 0}, state)
        if table == NO_TABLE:
            continue
        first = table * pages  # pages of the probed request
        by_token = view[first : first + pages].transpose(1, 3).flatten(0, 1)
        every = {token: token for token in range(_NUM_TOKENS)}
        trace.keep(f"keys and values of layer {layer}", every, by_token)
    return trace.bits


def _has_drafts(rows: Sequence[_Row]) -> bool:
    """Return whether rows of several tokens contain drafts."""
    return any(row.start >= _NUM_PROMPT and row.end - row.start > 1 for row in rows)


def _batch(
    rows: Sequence[_Row], tokens: Tensor, states: Tensor, tables: PageTables, pages: int
) -> ForwardBatch:
    """Return a step in host memory. Each request has `pages` consecutive pages in each table.

    Args:
        tokens: int32, by request.
        states: int32 [requests, state pages].
    """
    requests = torch.tensor([row.request for row in rows])
    starts = torch.tensor([row.start for row in rows])
    lengths = torch.tensor([row.end for row in rows])
    counts = lengths - starts
    query_starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    of_token = torch.arange(len(rows)).repeat_interleave(counts)
    positions = torch.arange(len(of_token)) - (query_starts[:-1] - starts)[of_token]
    num_tables, page_size = tables.num_tables, tables.page_size
    page_starts = [(requests * num_tables + table) * pages for table in range(num_tables)]
    own, nowhere = states[requests], torch.full_like(states[requests], -1)
    # The states of rows with drafts are written after the step.
    late = (counts > 1).unsqueeze(1) & _has_drafts(rows)
    # In rows with drafts, all tokens have logits. In other rows, only the last one has.
    wanted = (positions >= _NUM_PROMPT - 1) | (positions == lengths[of_token] - 1)
    long_rows = (counts > 1).nonzero()
    num_extends = 1 + int(long_rows[-1]) if len(long_rows) else 0
    return ForwardBatch(
        token_ids=tokens[requests[of_token], positions],
        positions=positions.int(),
        locations=tuple(starts[of_token] * page_size + positions for starts in page_starts),
        lengths=lengths.int(),
        page_starts=tuple(starts.int() for starts in page_starts),
        query_starts=query_starts.int(),
        sampled=wanted.nonzero().squeeze(1),
        state_reads=torch.where(starts.unsqueeze(1) > 0, own, nowhere),
        state_writes=torch.where(late, nowhere, own),
        state_marks=torch.zeros(len(rows), dtype=torch.int32),
        state_kept=torch.where(late, own, nowhere),
        page_ids=torch.arange(len(tokens) * num_tables * pages, dtype=torch.int32),
        slots=requests,
        num_decodes=len(rows) - num_extends,
        seen=(),
        extends=tuple((row.end - row.start, row.end) for row in rows[:num_extends]),
    )

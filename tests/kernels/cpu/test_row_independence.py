"""A row of any CPU operation has the same bits alone and with other rows.

The lists here have every operation of the compiled library, and every one that torch computes
instead. A new one fails until it is listed.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from engine.models.linear import Matrix, StoredExpert
from engine.models.linear.panels import PanelForm
from kernels import device
from kernels.adapters import low_rank
from kernels.attention import paged
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.cpu.operators import ACTIVATIONS, PANEL, Operators
from kernels.experts import routing
from kernels.experts.routing import Routing
from kernels.layers import rope
from kernels.layers.by_head import HeadMatrices
from kernels.linear_attention.state_cells import CellView, StateRows, addresses
from kernels.narrow import KVScales
from kernels.pages import rope_and_store as rope_and_store_module
from kernels.sampling import logprobs as logprobs_module

ROWS = 256
ALONE = 64  # of them are computed alone, and compared at any place of a batch
WIDTH = 192  # of the rows of an operation
COUNTS = [1, 2, 3, 5, 15, 16, 17, 63, 64, 127, ROWS]
NO_ROWS = "has no rows"
MOVES = "moves numbers and computes none"
LAYERS = "consists of the other operations; tests/engine compares its logits"

Operation = Callable[[Operators, Tensor, Tensor], Tensor]


@functools.cache
def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the same random numbers at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def ints(values) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def add_rms_norm(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    x, residual = x[:, :90].contiguous(), x[:, 90:180].contiguous()
    weight = numbers(90, dtype=x.dtype)
    return torch.cat(operators.add_rms_norm(x, residual, weight, 1e-6, None), 1)


def rope_and_store(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    """Return heads that are rotated completely and partly."""
    weight, found = numbers(48, dtype=x.dtype), []
    for pairs in (24, 5):
        kv = x.new_zeros(ROWS, 1, 2, 16, 48)
        angles = numbers(2, ROWS, pairs)[:, rows].contiguous()
        q = operators.rope_and_store(x, angles, kv, rows * 16, weight, weight, 1e-6)
        found += [q.flatten(1), kv[rows, 0, :, 0].flatten(1)]
    return torch.cat(found, 1)


def rope_and_store_latents(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    latents = x.new_zeros(ROWS, 1, 1, 16, 80)
    out = x.new_zeros(len(x), 2, 32)
    operators.rope_and_store_latents(
        x[:, :80],
        numbers(48, dtype=x.dtype),
        1e-6,
        x[:, 80:144].unflatten(1, (2, 32)),
        numbers(2, ROWS, 16)[:, rows].contiguous(),
        latents,
        rows * 16,
        out,
        interleaved=True,
    )
    return torch.cat((out.flatten(1), latents[rows, 0, 0, 0]), 1)


def act_and_mul(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    x = x[:, :180].contiguous()
    return torch.cat([operators.act_and_mul(x, name) for name in ACTIVATIONS], 1)


def states_of(
    rows: Tensor, heads: int, *shape: int, dtype: torch.dtype
) -> tuple[CellView, StateRows]:
    """Return states with these numbers, and rows of four tokens each that write theirs to other
    pages."""
    n = len(rows)
    view = numbers(2 * ROWS, heads, *shape, dtype=dtype).clone()
    reads, nowhere = rows.int().view(n, 1), torch.full((n, 1), -1, dtype=torch.int32)
    starts = torch.arange(n + 1, dtype=torch.int32) * 4
    states = StateRows(starts, reads, reads + ROWS, torch.zeros(n, dtype=torch.int32), nowhere, 0)
    return CellView(view, 0, 0, 1, heads), states


def causal_conv(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    columns = torch.tensor([[*range(1, 38)], [*range(40, 3, -1)]], dtype=torch.int32)
    cells, states = states_of(rows, 2, 37, 3, dtype=x.dtype)
    weight = numbers(2, 37, 4, dtype=x.dtype)
    out = operators.causal_conv(x.view(-1, 48), columns, weight, addresses(cells, states))
    return torch.cat((out.view(len(x), -1), cells.view[rows + ROWS].flatten(1)), 1)


def delta_rule(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    cells, states = states_of(rows, 2, 16, 7, dtype=torch.float32)
    tokens = x.view(-1, 1, 48)
    gates = tokens[..., :2], tokens[..., 2:4], numbers(2), numbers(2)
    of_states, given = addresses(cells, states), tokens[..., 2:].contiguous()
    out = operators.delta_rule(given, gates, of_states, (16, 7), 1e-6)
    return torch.cat((out.view(len(x), -1), cells.view[rows + ROWS].flatten(1)), 1)


def gated_rms_norm(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    heads, gate = x[:, :90].contiguous().view(-1, 2, 45), x[:, 92:182].unsqueeze(1)
    weights = numbers(45, dtype=x.dtype), numbers(45)
    return torch.cat([operators.gated_rms_norm(heads, gate, weight, 1e-6) for weight in weights], 1)


def gate_heads(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    return operators.gate_heads(x[:, :74].contiguous(), x[:, 80:].view(-1, 2, 56)[..., :37])


def likeliest(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    return operators.likeliest(x, -1).unsqueeze(1)


def sample(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    return operators.sample(
        x,
        temperature=0.5 + rows.float() / ROWS,
        top_k=rows.int() + 5,
        top_p=torch.full((len(rows),), 0.9),
        min_p=torch.full((len(rows),), 0.01),
        seeds=torch.stack((rows, rows + 7), 1).int(),
        positions=rows.int(),
        not_finite=-1,
    ).unsqueeze(1)


def apply_penalties(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    logits = x.float().clone()
    counts = (numbers(ROWS, WIDTH) * 2).int().clamp(0)
    each = 1 + rows.float() / ROWS
    local = torch.arange(len(rows))
    operators.apply_penalties(logits, local, counts, rows, each, each, each, 1 << 30)
    return logits


def embed(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    return operators.embed(rows.int(), ints([0]), numbers(ROWS, 30, dtype=x.dtype))


def float_product(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    if not operators.multiplies(x.dtype):
        return x
    weight, bias = numbers(130, 600, dtype=x.dtype), numbers(130, dtype=x.dtype)
    x = x.repeat(1, 4)[:, :600]
    return operators.float_product(x, operators.pack_panels(weight), 130, bias)


def stored_product(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    if not operators.multiplies(x.dtype):
        return x
    weight, bias = numbers(130, 599, dtype=x.dtype), numbers(130, dtype=x.dtype)
    return operators.stored_product(x.repeat(1, 4)[:, :599], weight, bias)


def int8_product(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    if not operators.multiplies(torch.int8):
        return x
    weight = (numbers(130, WIDTH) * 30).to(torch.int8)
    zeros = weight.int().sum(1, dtype=torch.int32) * 128
    panels = operators.pack_panels(weight)
    return operators.int8_product(x, panels, numbers(130), zeros, None)


def weight_only_product(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    """Multiply codes in five groups of inputs, of which the last is shorter."""
    codes, zeros, scales = numbers(130, 600), numbers(3, 5, PANEL), numbers(3, 5, PANEL)
    codes, zeros = ((each * 3 + 8).clamp(0, 15).to(torch.uint8) for each in (codes, zeros))
    panels = operators.pack_codes(codes)
    x = x.repeat(1, 4)[:, :600]
    return operators.weight_only_product(x, panels, scales, zeros, 128, 130, None)


def rope_angles(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    """Return the angles of heads whose pairs are no multiple of a vector."""
    return rope.rope_angles(rows.int() * 37, numbers(12).abs(), 1.0).transpose(0, 1).flatten(1)


def logprobs(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    chosen, ids, top = logprobs_module.logprobs(x, rows.int() % WIDTH, 5)
    return torch.cat((chosen.unsqueeze(1), ids, top), 1)


def add_low_rank(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    if not operators.multiplies(x.dtype):
        return x
    down, up = numbers(2, 16, WIDTH, dtype=x.dtype), numbers(2, 90, 16, dtype=x.dtype)
    mine = rows % 2
    order, count = mine.argsort().int(), int((mine == 0).sum())
    tokens = low_rank.TokensBySlot(order, ints([0, 0, count, 1, count, len(rows)]).view(2, 3))
    y = torch.zeros(len(x), 90, dtype=x.dtype)
    low_rank.add_low_rank(y, x, down, up, tokens, [90])
    return y


def route(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    ways = (
        Routing(4, True),
        Routing(3, False, "sigmoid", 2.5),
        Routing(6, True, "sigmoid", 1.5, 8, 3, 2),
    )
    given = x[:, :120].contiguous()
    routed = [routing.route(given, way, numbers(120)) for way in ways]
    return torch.cat([part.float() for parts in routed for part in parts], 1)


def add_experts(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    parts, places = numbers(999, 90, dtype=x.dtype), (rows[:, None] * 3 + torch.arange(3)) % 999
    return operators.add_experts(parts, places, x[:, :3].float().contiguous())


def add_gated(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    y, added, gates = (part.contiguous() for part in x[:, :181].split([90, 90, 1], 1))
    return operators.add_gated(y, added, gates)


def by_head_product(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 3, 70)
    HeadMatrices.of(numbers(3, 64, 70, dtype=x.dtype)).multiply(x.view(-1, 3, 64), out)
    return out.flatten(1) if operators.multiplies(x.dtype) else x


def grouped_mlp(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    """Return the sums of experts with and without biases. Their number and size are such that
    torch's `bmm` would add them in another order in another batch."""
    if not operators.multiplies(x.dtype):
        return x
    x, count, k = x[:, :90].contiguous(), 9, 8
    form, outs = PanelForm(x.dtype, operators), []
    weights, ids = numbers(ROWS, k)[rows].abs().contiguous(), rows[:, None] + torch.arange(k)
    for gate in ("silu", "clamped"):
        bias = numbers(48, dtype=x.dtype) if gate == "clamped" else None
        stored = [
            StoredExpert(Matrix(numbers(48, 90) * number), Matrix(numbers(90, 24)), bias, None)
            for number in range(1, count + 1)
        ]
        net = form.experts(stored, count, gate)
        outs.append(net.apply(x, weights, ids.int() % count))
    return torch.cat(outs, 1)


def attended(q: Tensor, kv: Tensor, rows: Tensor, value_dim: int | None, decode: bool) -> Tensor:
    """Return attention of rows with one query each. All rows share their first keys."""
    num_rows = len(rows)
    steps = AttentionRows(
        torch.arange(40, dtype=torch.int32),
        rows.int() * 0,
        torch.arange(num_rows + 1, dtype=torch.int32),
        rows.int() * 9 % 640 + 1,
        num_tokens=num_rows,
        num_decodes=num_rows if decode else 0,
    )
    plan = paged.plan_attention(steps, kv, AttentionKind(q.shape[1], value_dim=value_dim))
    return paged.paged_attention(q, kv, plan, Scoring(0.2))


def attention(operators: Operators, x: Tensor, rows: Tensor, *, decode: bool) -> Tensor:
    kv = numbers(40, 2, 2, 16, 48, dtype=x.dtype)
    return attended(x.view(-1, 4, 48), kv, rows, None, decode)


def pages_in_8_bits(operators: Operators, x: Tensor, rows: Tensor) -> Tensor:
    kv = (numbers(ROWS, 1, 2, 16, 48) * 3).to(torch.float8_e4m3fn)
    angles = numbers(2, ROWS, 24)[:, rows].contiguous()
    scales = KVScales(0.7, 1.3)
    q = rope_and_store_module.rope_and_store(x, angles, kv, rows * 16, scales=scales)
    stored = kv.view(torch.uint8)[rows, 0, :, 0].flatten(1)
    seen = (numbers(40, 1, 2, 16, 48) * 3).to(torch.float8_e4m3fn)
    return torch.cat((attended(q, seen, rows, None, True), stored.to(x.dtype)), 1)


def over_latents(operators: Operators, x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    kept = x.dtype if dtype == torch.float32 else dtype
    return attended(x.view(-1, 4, 48), numbers(40, 1, 1, 16, 48).to(kept), rows, 40, True)


OPERATIONS: dict[str, Operation | str] = {
    "add_rms_norm": add_rms_norm,
    "rope_and_store": rope_and_store,
    "rope_and_store_latents": rope_and_store_latents,
    "act_and_mul": act_and_mul,
    "soft_cap": lambda operators, x, rows: operators.soft_cap(x, 30.0),
    "rope_angles": rope_angles,
    "causal_conv": causal_conv,
    "delta_rule": delta_rule,
    "gated_rms_norm": gated_rms_norm,
    "gate_heads": gate_heads,
    "decode_attention": lambda *given: attention(*given, decode=True),
    "extend_attention": lambda *given: attention(*given, decode=False),
    "likeliest": likeliest,
    "sample": sample,
    "apply_penalties": apply_penalties,
    "embed": embed,
    "route": route,
    "add_experts": add_experts,
    "add_gated": add_gated,
    "by_head_product": by_head_product,
    "float_product": float_product,
    "stored_product": stored_product,
    "int8_product": int8_product,
    "weight_only_product": weight_only_product,
    "multiplies": NO_ROWS,
    "pack_panels": NO_ROWS,
    "pack_codes": NO_ROWS,
    "compute_layers": LAYERS,
}
# By the names of their references. The compiled ones are above.
IN_TORCH: dict[str, Operation | str] = {
    "logprobs": logprobs,
    "add_low_rank": add_low_rank,
    "apply_bitmask": MOVES,
    "store_kv": MOVES,
    "pack_pages": MOVES,
    "unpack_pages": MOVES,
    "move_early_rows": MOVES,
    "count_tokens": MOVES,
    "verify_drafts": MOVES,
    "grouped_mlp": grouped_mlp,
}
# Combinations of operations, which torch completes.
COMBINED: dict[str, Operation] = {
    "attention over latents": lambda *given: over_latents(*given, torch.float32),
    "pages in 8 bits": pages_in_8_bits,
    "latents in 8 bits": lambda *given: over_latents(*given, torch.float8_e4m3fn),
}


ALL = OPERATIONS | IN_TORCH | COMBINED
HELPERS = {"rms_norm", "rotate", "plan"}  # parts of operations


def references() -> set[str]:
    """Return the operations that have a reference in torch."""
    sources = (path.read_text() for path in Path(kernels.__file__).parent.rglob("*.py"))
    return {
        name for source in sources for name in re.findall(r"^def (\w+)_reference", source, re.M)
    }


def test_every_operation_is_listed():
    assert set(OPERATIONS) == {name for name in vars(Operators) if not name.startswith("_")}
    assert references() - set(OPERATIONS) - HELPERS == set(IN_TORCH)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("name", [name for name, of in ALL.items() if callable(of)])
def test_a_row_has_the_same_bits_beside_any_others(teams, monkeypatch, name, dtype):
    compute = ALL[name]
    torch.manual_seed(3)
    x = torch.randn(ROWS, WIDTH).to(dtype)

    def computed(team: Operators, given: Tensor, rows: Tensor) -> Tensor:
        monkeypatch.setattr(device, "compiled_for", lambda where: team)
        return compute(team, given, rows)

    alone = torch.cat([computed(teams[0], x[[row]], torch.tensor([row])) for row in range(ALONE)])
    for number, count in enumerate(COUNTS):
        compared = torch.randperm(ALONE)[:count]
        others = ALONE + torch.randperm(ROWS - ALONE)[: count - len(compared)]
        rows = torch.cat((compared, others))[torch.randperm(count)]
        given = x[rows]
        broken = torch.zeros(count, dtype=torch.bool)
        if number % 2:  # other rows that are not finite
            broken[1::3] = True
            given[broken] = torch.nan
        chosen = (rows < ALONE) & ~broken
        actual = computed(teams[number % len(teams)], given, rows)[chosen]
        assert torch.equal(actual, alone[rows[chosen]]), f"{count} rows"


def test_logprobs_of_a_large_vocabulary_do_not_depend_on_threads_or_other_rows():
    x = torch.randn(20, 262_144, generator=torch.Generator().manual_seed(1))
    tokens, threads, results = torch.arange(20, dtype=torch.int32), torch.get_num_threads(), []
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            rows = [logprobs_module.logprobs(x[[i]], tokens[[i]], 3) for i in range(20)]
            results.append(logprobs_module.logprobs(x, tokens, 3))
            results.append(tuple(torch.cat(column) for column in zip(*rows, strict=True)))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(map(torch.equal, result, results[0]))

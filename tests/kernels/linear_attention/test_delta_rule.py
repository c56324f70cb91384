"""The delta rule, compared with its definition, token by token in float64."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from kernels import device
from kernels.linear_attention.delta_chunks import CHUNK
from kernels.linear_attention.delta_rule import Gates, delta_rule
from tests.kernels.conftest import DEVICE, check_refused
from tests.kernels.linear_attention.state_case import NONE, cells_of, get, put, rows_of

KEY_HEADS, GROUP, K, V = 2, 2, 16, 8
HEADS = KEY_HEADS * GROUP


def inputs(num_tokens, dtype=torch.float32, group=GROUP, v=V):
    channels = 2 * K + group * v
    x = torch.randn(num_tokens, KEY_HEADS, channels, device=DEVICE).to(dtype)
    # In the order of one product: b, then a, of each key head.
    both = torch.randn(num_tokens, KEY_HEADS, 2 * group, device=DEVICE).to(dtype)
    b, a = both.split(group, dim=2)
    a_log, dt_bias = torch.randn(2, KEY_HEADS * group, device=DEVICE)
    return x, Gates(a, b, a_log, dt_bias)


def one_row(x, gates, state):
    """Return outputs [tokens, heads, v] and the state after every token [tokens, heads, k, v]."""
    num_tokens = len(x)
    heads, k_size, v_size = state.shape
    group = heads // x.shape[1]
    q, k, v = x.double().split((k_size, k_size, group * v_size), dim=2)
    v = v.reshape(num_tokens, heads, v_size)
    a, b = gates.a.flatten(1).double(), gates.b.flatten(1).double()
    speed, bias = gates.a_log.double().exp(), gates.dt_bias.double()
    outputs, states, state = [], [], state.double()
    for t in range(num_tokens):
        for_head = []
        after = []
        for h in range(heads):
            key, query = k[t, h // group], q[t, h // group]
            key = key / (key.dot(key) + 1e-6).sqrt()
            query = query / (query.dot(query) + 1e-6).sqrt() / k_size**0.5
            decay = torch.exp(-speed[h] * torch.log1p(torch.exp(a[t, h] + bias[h])))
            s = state[h] * decay
            s = s + torch.outer(key, (v[t, h] - key @ s) * torch.sigmoid(b[t, h]))
            for_head.append(query @ s)
            after.append(s)
        state = torch.stack(after)
        outputs.append(torch.stack(for_head))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def of_row(gates, start, end):
    return Gates(gates.a[start:end], gates.b[start:end], gates.a_log, gates.dt_bias)


def check_rows(out, given, firsts, cells, rows, writes, kept, tolerances=(2e-5, 2e-5)):
    """Compare the outputs of every row, the state that it leaves, and the one at its mark."""
    (x, gates), of_outputs, of_states = given, *tolerances
    starts = rows.starts.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        outputs, states = one_row(x[start:end], of_row(gates, start, end), firsts[row])
        close(out[start:end], outputs, of_outputs)
        if writes[row] != NONE:
            close(get(cells, writes[row]), states[-1], of_states)
        if rows.marks[row]:
            close(get(cells, kept[row]), states[int(rows.marks[row]) - 1], of_states)


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "layout, group, v, longest",
    [
        ({"per_page": 2}, GROUP, V, 6),
        ({"per_page": 3, "step": 3, "first": 2, "first_page": 0}, 1, 5, 70),  # and whole chunks
        ({"per_page": 4, "step": 1, "first": 1, "first_page": 1}, GROUP, V, 6),
    ],
)
def test_rows_of_all_lengths_read_their_states_and_write_the_requested_ones(
    implementation, layout, group, v, longest
):
    """From zeros, in place, from one state to another, and without output. With states to keep
    on the way and at the end, and two decode rows."""
    counts = [longest, 3, 1, 5, 1, 1]
    reads, writes = [NONE, 1, 2, 3, 4, NONE], [0, 1, 5, NONE, 4, 6]
    marks, kept = [longest // 64 * 64 or 4, 3, 0, 2, 0, 0], [7, 9, NONE, 8, NONE, NONE]
    rows = rows_of(counts, reads, writes, marks=marks, kept=kept)
    x, gates = inputs(sum(counts), group=group, v=v)
    cells, pool = cells_of(KEY_HEADS * group, (K, v), **layout)
    before = {}
    for state in (1, 2, 3, 4):
        before[state] = torch.randn(KEY_HEADS * group, K, v, device=DEVICE)
        put(cells, state, before[state])
    out = delta_rule(x, gates, cells, rows)
    firsts = [before.get(state, torch.zeros_like(before[1])) for state in reads]
    check_rows(out, (x, gates), firsts, cells, rows, writes, kept)
    close(get(cells, 2), before[2].double())  # read, and written elsewhere
    close(get(cells, 3), before[3].double())
    num_written = len({0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
    assert int((~pool.isnan()).sum()) == num_written * KEY_HEADS * group * K * v


def test_padding_rows_write_no_state_and_give_numbers(implementation):
    rows = rows_of([1, 1, 1], [0, NONE, NONE], [0, NONE, NONE])
    x, gates = inputs(3)
    cells, pool = cells_of(HEADS, (K, V))
    put(cells, 0, torch.zeros(HEADS, K, V, device=DEVICE))
    assert delta_rule(x, gates, cells, rows).isfinite().all()
    assert int((~pool.isnan()).sum()) == HEADS * K * V


def check_cut(at, end, dtype=torch.float32):
    """Compute a prompt whole and in two parts, which must have the same bits."""
    x, gates = inputs(end, dtype)
    whole, _ = cells_of(HEADS, (K, V))
    expected = delta_rule(x, gates, whole, rows_of([end], [NONE], [0]))
    cut, _ = cells_of(HEADS, (K, V))
    first = delta_rule(x[:at], of_row(gates, 0, at), cut, rows_of([at], [NONE], [5]))
    rest = delta_rule(x[at:], of_row(gates, at, end), cut, rows_of([end - at], [5], [0]))
    assert torch.equal(torch.cat((first, rest)), expected)
    assert torch.equal(get(cut, 0), get(whole, 0))


def test_a_prompt_cut_at_a_chunk_boundary_gives_the_same_bits(implementation):
    # The reference computes short rows differently.
    check_cut(64, 67 if implementation == "triton" else 130)


@pytest.mark.parametrize(
    "at, end, dtype", [(2 * CHUNK, 3 * CHUNK + 5, torch.float16), (21, 40, torch.float32)]
)
def test_kernels_give_the_same_bits_if_a_prompt_is_cut(by_kernels, at, end, dtype):
    """At a chunk boundary, and in float32 anywhere."""
    check_cut(at, end, dtype)


def test_a_state_moves_back_to_the_last_accepted_token(implementation):
    """It equals the state after one token at a time. This runs when the accepted drafts are
    known."""
    x, gates = inputs(9)
    state = torch.randn(HEADS, K, V, device=DEVICE)
    cells, _ = cells_of(HEADS, (K, V))
    put(cells, 1, state)
    late = rows_of([9], [1], [NONE], marks=[4], kept=[1])
    together = delta_rule(x, gates, cells, late)
    alone, _ = cells_of(HEADS, (K, V))
    put(alone, 1, state)
    one_by_one = [
        delta_rule(x[t : t + 1], of_row(gates, t, t + 1), alone, rows_of([1], [1], [1]))
        for t in range(4)
    ]
    close(get(cells, 1), get(alone, 1).double(), 1e-6)
    close(together[:4], torch.cat(one_by_one).double(), 1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3)])
def test_half_precision_is_computed_in_float32(implementation, dtype, tolerance):
    x, gates = inputs(9, dtype)
    cells, _ = cells_of(HEADS, (K, V))
    out = delta_rule(x, gates, cells, rows_of([9], [NONE], [0]))
    outputs, states = one_row(x, gates, torch.zeros(HEADS, K, V, device=DEVICE))
    assert out.dtype == dtype
    close(out, outputs, tolerance)
    close(get(cells, 0), states[-1])


@pytest.mark.parametrize(
    "longest, mark",
    [
        (41, 9),
        pytest.param(48, 48, marks=pytest.mark.long),
        pytest.param(97, 32, marks=pytest.mark.long),
        pytest.param(150, 100, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("group, v, architecture", [(GROUP, V, 90), (1, 37, 90), (1, 37, 120)])
def test_a_prompt_in_chunks_equals_its_tokens_one_by_one(
    by_kernels, longest, mark, group, v, architecture, monkeypatch
):
    """With a short row and a decode row in the batch. float16 is rounded in products like
    bfloat16."""
    monkeypatch.setattr(device, "architecture", lambda: architecture)
    counts, reads, writes = [longest, 3, 1], [1, NONE, 2], [1, 4, NONE]
    kept = [3, NONE, NONE]
    rows = rows_of(counts, reads, writes, marks=[mark, 0, 0], kept=kept)
    x, gates = inputs(sum(counts), torch.float16, group, v)
    heads = KEY_HEADS * group
    cells, pool = cells_of(heads, (K, v), per_page=3, first=1, step=2)
    before = [torch.randn(heads, K, v, device=DEVICE) for _ in "12"]
    put(cells, 1, before[0])
    put(cells, 2, before[1])
    out = delta_rule(x, gates, cells, rows)
    firsts = (before[0], torch.zeros_like(before[0]), before[1])
    check_rows(out, (x, gates), firsts, cells, rows, writes, kept, (2e-3, 1e-3))
    close(get(cells, 2), before[1].double())
    assert int((~pool.isnan()).sum()) == 4 * heads * K * v


def test_equal_keys_without_decay_are_exact_in_chunks(by_kernels):
    """The hardest triangular system: every token replaces the value of the previous one."""
    x, gates = inputs(40, torch.float16)
    x[:, :, K : 2 * K] = x[:1, :, K : 2 * K]
    gates = gates._replace(b=torch.full_like(gates.b, 9.0), a_log=gates.a_log - 20)
    cells, _ = cells_of(HEADS, (K, V))
    out = delta_rule(x, gates, cells, rows_of([40], [NONE], [0]))
    outputs, states = one_row(x, gates, torch.zeros(HEADS, K, V, device=DEVICE))
    close(out, outputs, 3e-3)
    close(get(cells, 0), states[-1], 3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_outputs_and_states_have_the_same_bits_wherever_a_row_is_cut(
    operators, monkeypatch, dtype
):
    """Chunks of random sizes, decode rows, and drafts of which some are accepted."""
    monkeypatch.setattr("kernels.device.compiled_for", lambda where: operators)
    end, v = 90, 70
    x, gates = inputs(end, dtype, v=v)
    whole, _ = cells_of(HEADS, (K, v))
    marked = rows_of([end], [NONE], [0], marks=[77], kept=[3])
    expected = delta_rule(x, gates, whole, marked)
    cut, _ = cells_of(HEADS, (K, v))
    draw, start, outputs = random.Random(3), 0, []
    while start < end:
        count = draw.choice([1, 1, 2, 17, 33])
        stop = min(end, start + count, 77 if start < 77 else end)
        before = NONE if start == 0 else 0
        part, own = x[start:stop], of_row(gates, start, stop)
        if draw.random() < 0.5:  # verified first, and written later
            late = min(end, stop + 3)
            more, behind = x[start:late], of_row(gates, start, late)
            verified = delta_rule(more, behind, cut, rows_of([late - start], [before], [NONE]))
            outputs.append(verified[: stop - start])
            kept = rows_of([late - start], [before], [NONE], marks=[stop - start], kept=[0])
            delta_rule(more, behind, cut, kept)
        else:
            outputs.append(delta_rule(part, own, cut, rows_of([len(part)], [before], [0])))
        start = stop
        if start == 77:
            assert torch.equal(get(cut, 0), get(whole, 3))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(get(cut, 0), get(whole, 0))


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    x, gates = inputs(3)
    cells, _ = cells_of(HEADS, (K, V))
    rows = rows_of([3], [NONE], [0])
    check_refused("matrices", delta_rule, x[:, :, 1:], gates, cells, rows)
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    check_refused("contiguous x", delta_rule, by_head, gates, cells, rows)
    halves = cells._replace(view=cells.view.half())
    check_refused("float32 states", delta_rule, x, gates, halves, rows)
    check_refused("gates", delta_rule, x, gates._replace(a=gates.a[:2]), cells, rows)
    check_refused("gates", delta_rule, x, gates._replace(b=gates.b.double()), cells, rows)
    check_refused("a_log", delta_rule, x, gates._replace(a_log=gates.a_log.double()), cells, rows)
    check_refused("int32", delta_rule, x, gates, cells, replace(rows, starts=rows.starts.long()))

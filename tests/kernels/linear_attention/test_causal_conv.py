"""The short convolution, compared with explicit sums, and its states."""

from dataclasses import replace

import pytest
import torch

from kernels.linear_attention.causal_conv import causal_conv
from tests.kernels.conftest import DEVICE, check_refused
from tests.kernels.linear_attention.state_case import NONE, cells_of, get, put, rows_of

KEY_HEADS, Q, V = 2, 8, 13
CHANNELS = 2 * Q + V


def by_head():
    """Return columns in the order of Qwen3-Next's product: q, k, v and other columns of each
    head."""
    columns = torch.arange(KEY_HEADS)[:, None] * (CHANNELS + 5) + torch.arange(CHANNELS)
    return columns.int().to(DEVICE)


def mixed_up():
    return torch.randperm(KEY_HEADS * (CHANNELS + 5))[: KEY_HEADS * CHANNELS].int().view(
        KEY_HEADS, CHANNELS).to(DEVICE)  # fmt: skip


def inputs(num_tokens, dtype=torch.float32):
    return torch.randn(num_tokens, KEY_HEADS * (CHANNELS + 5) + 3, device=DEVICE).to(dtype)[:, 3:]


@pytest.mark.parametrize(
    "make, width, per_page", [(by_head, 4, 2), (mixed_up, 2, 1), (mixed_up, 4, 2)]
)
def test_rows_of_all_lengths_see_earlier_inputs_and_keep_their_last(
    implementation, make, width, per_page
):
    counts, reads, writes = [137, 2, 1, 1, 1], [NONE, 1, 2, 0, NONE], [3, 1, 5, 0, NONE]
    marks, kept = [133, 2, 0, 0, 0], [7, 8, NONE, NONE, NONE]
    rows = rows_of(counts, reads, writes, marks=marks, kept=kept)
    x, columns = inputs(sum(counts)), make()
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE)
    cells, pool = cells_of(KEY_HEADS, (CHANNELS, width - 1), per_page=per_page)
    before = {}
    for state in (0, 1, 2):
        before[state] = torch.randn(KEY_HEADS, CHANNELS, width - 1, device=DEVICE)
        put(cells, state, before[state])
    y = causal_conv(x, columns, weight, cells, rows)
    given, start = x[:, columns], 0
    for row, count in enumerate(counts):
        zeros = torch.zeros(KEY_HEADS, CHANNELS, width - 1, device=DEVICE)
        seen = torch.cat(
            (before.get(reads[row], zeros), given[start : start + count].permute(1, 2, 0)), dim=2
        )
        for t in range(count):
            total = (seen[:, :, t : t + width] * weight).sum(-1)
            expected = total * torch.sigmoid(total)
            torch.testing.assert_close(y[start + t], expected, atol=1e-5, rtol=1e-5)
        if writes[row] != NONE:
            assert torch.equal(get(cells, writes[row]), seen[:, :, count:])
        if marks[row]:
            at = marks[row]
            assert torch.equal(get(cells, kept[row]), seen[:, :, at : at + width - 1])
        start += count
    assert torch.equal(get(cells, 2), before[2])
    assert int((~pool.isnan()).sum()) == 7 * KEY_HEADS * CHANNELS * (width - 1)


@pytest.mark.parametrize("end", [63, 64, 65, 128])
def test_tiles_of_a_row_see_earlier_tokens_and_one_of_them_writes_the_state(implementation, end):
    """Results equal those of one token after the other, in place, with rows whose ends are
    around a tile's."""
    x, width = inputs(2 * end), 4
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE)
    cells, apart = (cells_of(KEY_HEADS, (CHANNELS, width - 1))[0] for _ in range(2))
    for state in (1, 2):
        before = torch.randn(KEY_HEADS, CHANNELS, width - 1, device=DEVICE)
        put(cells, state, before)
        put(apart, state, before)
    rows = rows_of([end, end], [1, 2], [1, 2], marks=[end - 1, 0], kept=[3, NONE])
    y = causal_conv(x, by_head(), weight, cells, rows)
    for state, start in ((1, 0), (2, end)):
        for first, stop in ((0, 50), (50, end)):
            part = x[start + first : start + stop]
            found = causal_conv(
                part, by_head(), weight, apart, rows_of([len(part)], [state], [state])
            )
            torch.testing.assert_close(y[start + first : start + stop], found, atol=1e-5, rtol=1e-5)
        assert torch.equal(get(cells, state), get(apart, state))
    assert torch.equal(get(cells, 3), x[:, by_head()][end - width : end - 1].permute(1, 2, 0))


@pytest.mark.parametrize("mark", [1, 3, 9])
def test_a_state_moves_back_to_the_last_accepted_token(implementation, mark):
    """With the bits of one token after the other, as when the accepted drafts are known."""
    x, width = inputs(9), 4
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE)
    state = torch.randn(KEY_HEADS, CHANNELS, width - 1, device=DEVICE)
    cells, alone = (cells_of(KEY_HEADS, (CHANNELS, width - 1))[0] for _ in range(2))
    for each in (cells, alone):
        put(each, 1, state)
    late = rows_of([9], [1], [NONE], marks=[mark], kept=[1])
    together = causal_conv(x, by_head(), weight, cells, late)
    rows = rows_of([1], [1], [1])
    one_by_one = [causal_conv(x[t : t + 1], by_head(), weight, alone, rows) for t in range(mark)]
    assert torch.equal(get(cells, 1), get(alone, 1))
    assert torch.equal(together[:mark], torch.cat(one_by_one))


def test_a_row_without_pages_to_keep_changes_no_other_memory(implementation):
    """Page -1 would be before the pool."""
    weight = torch.randn(KEY_HEADS, CHANNELS, 4, device=DEVICE)
    whole, _ = cells_of(KEY_HEADS, (CHANNELS, 3))
    cells = whole._replace(view=whole.view[1:])
    rows = rows_of([2, 1], [NONE, 1], [NONE, NONE], marks=[2, 1], kept=[0, NONE])
    causal_conv(inputs(3), by_head(), weight, cells, rows)
    assert whole.view[:1].isnan().all()  # as before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_outputs_and_states_have_the_same_bits_wherever_a_row_is_cut(
    operators, monkeypatch, dtype
):
    monkeypatch.setattr("kernels.device.compiled_for", lambda where: operators)
    x, width = inputs(60, dtype), 4
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE).to(dtype)
    whole, cut = (cells_of(KEY_HEADS, (CHANNELS, width - 1), dtype=dtype)[0] for _ in range(2))
    expected = causal_conv(x, by_head(), weight, whole, rows_of([60], [NONE], [0]))
    outputs, ends = [], [1, 2, 4, 21, 22, 59, 60]
    for start, end in zip([0, *ends], ends, strict=False):
        rows = rows_of([end - start], [0 if start else NONE], [0])
        outputs.append(causal_conv(x[start:end], by_head(), weight, cut, rows))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(get(cut, 0), get(whole, 0))


def test_half_precision_is_summed_in_float32(implementation):
    x, width = inputs(20, torch.float16), 4
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE).half()
    cells, _ = cells_of(KEY_HEADS, (CHANNELS, width - 1), dtype=torch.float16)
    y = causal_conv(x, by_head(), weight, cells, rows_of([20], [NONE], [0]))
    wide, _ = cells_of(KEY_HEADS, (CHANNELS, width - 1))
    expected = causal_conv(x.float(), by_head(), weight.float(), wide, rows_of([20], [NONE], [0]))
    torch.testing.assert_close(y.float(), expected, atol=4e-3, rtol=4e-3)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    x, columns, width = inputs(3), by_head(), 4
    weight = torch.randn(KEY_HEADS, CHANNELS, width, device=DEVICE)
    cells, _ = cells_of(KEY_HEADS, (CHANNELS, width - 1))
    rows = rows_of([3], [NONE], [0])
    check_refused("columns", causal_conv, x, columns.long(), weight, cells, rows)
    narrow = weight[:, :, 1:].contiguous()
    check_refused("do not fit weight", causal_conv, x, columns, narrow, cells, rows)
    check_refused("contiguous", causal_conv, x, columns, weight.mT.contiguous().mT, cells, rows)
    by_column = x.t().contiguous().t()
    check_refused("not contiguous", causal_conv, by_column, columns, weight, cells, rows)
    other = replace(rows, writes=rows.writes[:, 1:])
    check_refused("different shapes", causal_conv, x, columns, weight, cells, other)

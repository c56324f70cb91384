"""Experts, compared with each token's own sum in float64, for any assignment of tokens."""

from dataclasses import replace

import pytest
import torch

from kernels import device
from kernels.experts.grouped_kernels import MANY_PAIRS, group_kernel, tile_for
from kernels.experts.grouped_mlp import ExpertMatrices, grouped_mlp
from kernels.quantised import Quantisation, widened
from tests.kernels.conftest import DEVICE, check_refused
from tests.kernels.layers.test_act_and_mul import in_float64
from tests.kernels.layers.test_quantized_linear import quantised

# tokens, hidden, inner, experts, experts per token
SHAPES = [
    (0, 32, 16, 4, 2),
    (1, 64, 32, 4, 2),
    (7, 96, 72, 8, 3),  # neither width a whole number of tiles
    (40, 64, 32, 2, 1),  # more rows to an expert than a tile has
    (5, 33, 17, 3, 3),
]


def drawn(n, hidden, inner, num_experts, k, dtype=torch.float32):
    def tensor(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    ids = torch.rand(n, num_experts, device=DEVICE).argsort(-1)[:, :k].int().contiguous()
    return (
        tensor(n, hidden),
        tensor(num_experts, 2 * inner, hidden) * hidden**-0.5,
        tensor(num_experts, hidden, inner) * inner**-0.5,
        torch.rand(n, k, device=DEVICE),
        ids,
    )


def computed(x, gate_up, down, weights, ids, gate, biases=(None, None), formats=(None, None)):
    parts = zip((gate_up, down), biases, formats, strict=True)
    matrices = (ExpertMatrices(*each) for each in parts)
    return grouped_mlp(x, *matrices, weights, ids, gate)


def exact(x, gate_up, down, weights, ids, gate, biases=(None, None)):
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    up_bias, down_bias = (torch.zeros(len(down)) if each is None else each for each in biases)
    out = torch.zeros_like(x)
    for token, (row, chosen) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(row, chosen, strict=True):
            both = gate_up[expert] @ x[token] + up_bias[expert]
            inner = clamped(both) if gate == "clamped" else in_float64(both, gate)
            out[token] += weight * (down[expert] @ inner + down_bias[expert])
    return out


def clamped(both):
    """Return the gated numbers of gpt-oss."""
    gate, up = both.chunk(2)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    "shape, activation",
    [*((shape, "silu") for shape in SHAPES), (SHAPES[-1], "gelu"), (SHAPES[-1], "gelu_tanh")],
    ids=str,
)
def test_each_token_gets_the_sum_of_its_experts(implementation, shape, activation):
    given = drawn(*shape)
    actual = computed(*given, activation)
    torch.testing.assert_close(actual.double(), exact(*given, activation), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [SHAPES[1], *SHAPES[3:]], ids=str)
def test_gpt_oss_experts_have_biases_and_clamped_gates(implementation, shape):
    given = drawn(*shape)
    given[1].mul_(5)  # beyond the limit, on either side
    biases = [torch.randn(part.shape[:2], device=DEVICE) for part in given[1:3]]
    found = computed(*given, "clamped", biases).double()
    torch.testing.assert_close(found, exact(*given, "clamped", biases), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_is_near_the_exact_sum(implementation, dtype, tolerance):
    if dtype == torch.bfloat16 and implementation == "triton" and DEVICE.type == "cpu":
        pytest.skip("the interpreter computes bfloat16 wrongly")
    given = drawn(9, 64, 48, 4, 2, dtype)
    actual = computed(*given, "silu")
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), exact(*given, "silu"), atol=tolerance, rtol=tolerance
    )


def test_many_pairs_use_larger_tiles_with_the_same_depth(monkeypatch):
    """The depth is the order of summation, which determines a token's bits."""
    few, many = (tile_for(2, pairs, 8, 90, 0) for pairs in (8 * MANY_PAIRS - 1, 8 * MANY_PAIRS))
    assert (few.rows, many.rows, many.columns) == (64, 128, 256)
    assert few.depth == many.depth
    assert tile_for(2, 8 * MANY_PAIRS, 8, 80, 0) == few
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    given = drawn(2 * MANY_PAIRS + 5, 72, 300, 2, 1, torch.float16)
    actual = computed(*given, "silu")
    torch.testing.assert_close(actual.double(), exact(*given, "silu"), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("expert", [0, 2, 3])
def test_all_tokens_may_use_the_same_expert(implementation, expert):
    """The first or the last expert may get no token."""
    x, gate_up, down, weights, ids = drawn(70, 32, 16, 4, 1)
    ids.fill_(expert)
    expected = exact(x, gate_up, down, weights, ids, "silu")
    actual = computed(x, gate_up, down, weights, ids, "silu")
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reads", [0.5, 1, 7, 32, 34.5])  # a lane stores 32 of its reads
@pytest.mark.parametrize("num_experts", [1, 5])
def test_pairs_are_grouped_by_expert(reads, num_experts):
    lanes = 16
    ids = torch.randint(num_experts + 1, (int(reads * lanes),), device=DEVICE).int()
    starts = torch.full((num_experts + 1,), -1, device=DEVICE).int()
    order = torch.full_like(ids, -1)
    group_kernel[(num_experts,)](ids, starts, order, len(ids), lanes, num_warps=4)
    counts = torch.bincount(ids, minlength=num_experts + 1).tolist()[:-1]
    assert starts.tolist() == [sum(counts[:expert]) for expert in range(num_experts + 1)]
    for expert, group in enumerate(order[: sum(counts)].split(counts)):
        assert torch.equal(group.sort().values, (ids == expert).nonzero()[:, 0].int())


def test_a_tokens_bits_do_not_depend_on_other_tokens(monkeypatch):
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    x, gate_up, down, weights, ids = drawn(45, 64, 32, 4, 2)
    together = computed(x, gate_up, down, weights, ids, "silu")
    for rows in (slice(0, 1), slice(3, 20), slice(44, 45)):
        alone = computed(x[rows], gate_up, down, weights[rows], ids[rows], "silu")
        assert torch.equal(together[rows], alone)


@pytest.mark.gpu
def test_the_number_of_tokens_selects_a_tile_and_changes_no_bit():
    x, gate_up, down, weights, ids = drawn(4 * MANY_PAIRS, 256, 512, 2, 1, torch.float16)
    together = grouped_mlp(x, gate_up, down, weights, ids, "silu")
    few = slice(3, 20)
    assert torch.equal(
        together[few], grouped_mlp(x[few], gate_up, down, weights[few], ids[few], "silu")
    )


def quantised_experts(count, rows, columns, group, kind):
    """Return matrices with weights of the usual magnitude, and the weights."""
    numbers, quantisation, wide = quantised(count * rows, columns, group, kind)
    scales = (quantisation.scales / (wide.std() * columns**0.5)).to(quantisation.scales.dtype)
    quantisation = replace(quantisation, scales=scales)
    own = quantisation.with_tensors(lambda part: part.view(count, rows, -1))
    weights = widened(numbers, quantisation).view(count, rows, columns)
    return ExpertMatrices(numbers.view(count, rows, -1), None, own), weights


# hidden, inner, inputs that share a scale
@pytest.mark.parametrize(
    "sizes",
    [(64, 48, 16), pytest.param((100, 40, 64), marks=pytest.mark.long), (64, 32, 0)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
def test_experts_with_quantized_weights_are_exact(implementation, sizes, kind):
    hidden, inner, group = sizes
    x, _, _, weights, ids = drawn(20, hidden, inner, 5, 2)
    gate_up, wide = quantised_experts(5, 2 * inner, hidden, group, kind)
    down, wide_down = quantised_experts(5, hidden, inner, group, kind)
    expected = exact(x, wide, wide_down, weights, ids, "silu")
    found = grouped_mlp(x, gate_up, down, weights, ids, "silu")
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, group", [("fp8", 64), ("int8", 0), ("int4", 32), ("fp4", 32)])
def test_many_pairs_of_quantized_experts_use_larger_tiles_too(monkeypatch, kind, group):
    few, many = (tile_for(2, pairs, 2, 90, 32) for pairs in (2 * MANY_PAIRS - 1, 2 * MANY_PAIRS))
    assert (few.rows, few.columns, many.rows, many.columns) == (64, 64, 128, 128)
    assert few.depth == many.depth == 32
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    hidden, inner = 128, 160
    x, _, _, weights, ids = drawn(2 * MANY_PAIRS + 5, hidden, inner, 2, 1, torch.float16)
    gate_up, wide = quantised_experts(2, 2 * inner, hidden, group, kind)
    down, wide_down = quantised_experts(2, hidden, inner, group, kind)
    expected = exact(x, wide, wide_down, weights, ids, "silu")
    found = grouped_mlp(x, gate_up, down, weights, ids, "silu")
    torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=4e-3)


def test_unused_experts_are_not_read(implementation):
    x, gate_up, down, weights, ids = drawn(6, 32, 16, 5, 2)
    ids[:] = torch.tensor([1, 3], device=DEVICE)
    expected = computed(x, gate_up, down, weights, ids, "silu")
    gate_up[[0, 2, 4]] = torch.nan
    down[[0, 2, 4]] = torch.nan
    assert torch.equal(computed(x, gate_up, down, weights, ids, "silu"), expected)


def test_pairs_without_an_expert_add_nothing(implementation, monkeypatch):
    """Other ranks have their experts. Unwritten memory is NaN here."""
    x, gate_up, down, weights, ids = drawn(50, 64, 32, 3, 3)
    others = torch.rand(50, 3, device=DEVICE) < 0.5
    expected = exact(x, gate_up, down, weights * ~others, ids, "silu")
    ids[others], weights[others] = 3, 0.0
    real = torch.empty

    def undefined(*size, dtype=None, **options):
        made = real(*size, dtype=dtype, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(-(1 << 20))

    monkeypatch.setattr(torch, "empty", undefined)
    found = computed(x, gate_up, down, weights, ids, "silu")
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_wrong_shapes_and_dtypes_are_rejected():
    x, gate_up, down, weights, ids = (tensor.cpu() for tensor in drawn(3, 32, 16, 4, 2))
    for wrong in (
        (x[:, :31].contiguous(), gate_up, down, weights, ids),
        (x.half(), gate_up, down, weights, ids),
        (x, gate_up, down, weights, ids[:2]),
        (x, gate_up, down, weights, ids.long()),
        (x, gate_up, down, weights.t(), ids.t()),
        (x, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down, weights, ids),
    ):
        check_refused(r"experts|weights|contiguous", computed, *wrong, "silu")
    formats = (Quantisation(torch.ones(4, 32, 2)), None)
    given = x, gate_up.char(), down, weights, ids, "silu"
    check_refused(r"scales, zeros: \(4, 32, 1\) expected", computed, *given, formats=formats)

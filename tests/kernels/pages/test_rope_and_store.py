"""QK-norm, rotation and the write into pages, compared with complex numbers token by token."""

import math

import pytest
import torch

from kernels.layers.rope import rope_angles
from kernels.pages.rope_and_store import rope_and_store
from tests.kernels.conftest import DEVICE, check_refused

PAGE_SIZE = 4
NOWHERE = -1
EPS = 0.03  # so large that it has a visible effect


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norms_of(head_dim, with_norm=True, dtype=torch.float32):
    if not with_norm:
        return {}
    q_norm, k_norm = randn(2, head_dim, dtype=dtype)
    return {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}


def kv_layer(kv_heads, head_dim, num_pages=6, num_layers=3, layer=1, dtype=torch.float32):
    """Return one layer's strided view of a pool of NaN, and the pool."""
    shape = (num_pages, kv_heads, num_layers, 2, PAGE_SIZE, head_dim)
    pool = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    return pool[:, :, layer], pool


def rotated(x, position, frequencies):
    """Return [heads, head_dim] in float64: n pairs (i, i + n) as rotated complex numbers, and
    the rest unchanged."""
    n = len(frequencies)
    numbers = torch.complex(x[:, :n].double(), x[:, n : 2 * n].double())
    angles = (position * frequencies).double()
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[:, 2 * n :].double()), dim=-1)


def normed(x, weight):
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(qkv, kv_heads, head_dim, positions, locations, norms, tolerance, pairs=None):
    """Check q of every token, K and V at every location, and that nothing else in the pool was
    written."""
    num_tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    frequencies = torch.rand(pairs or head_dim // 2, device=DEVICE)
    positions = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    kv, pool = kv_layer(kv_heads, head_dim, dtype=qkv.dtype)
    q = rope_and_store(
        qkv,
        rope_angles(positions, frequencies, 1.0),
        kv,
        torch.tensor([0, *locations], device=DEVICE)[1:],
        **norms,
    )
    assert q.shape == (num_tokens, heads, head_dim) and q.dtype == qkv.dtype
    for token, (position, location) in enumerate(zip(positions.float(), locations, strict=True)):
        own_q, own_k, own_v = qkv[token].view(-1, head_dim).split((heads, kv_heads, kv_heads))
        if norms:
            own_q, own_k = normed(own_q, norms["q_norm"]), normed(own_k, norms["k_norm"])
        found = [(q[token], rotated(own_q, position, frequencies))]
        if location != NOWHERE:
            page, offset = divmod(location, PAGE_SIZE)
            found.append((kv[page, :, 0, offset], rotated(own_k, position, frequencies)))
            assert torch.equal(kv[page, :, 1, offset], own_v)
        for actual, expected in found:
            torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    written = sum(location != NOWHERE for location in locations) * 2 * kv_heads * head_dim
    assert int((~pool.isnan()).sum()) == written, "something else was written too"


SMALL = [(1, 1, 2), (4, 2, 6), (6, 1, 32), (18, 9, 64)]
LARGE = [(14, 2, 64), (32, 8, 128), (8, 4, 256)]  # of real models


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, dtype, tolerance",
    [
        *((*shape, torch.float32, 1e-5) for shape in SMALL),
        *(pytest.param(*shape, torch.bfloat16, 2**-6, marks=pytest.mark.gpu) for shape in LARGE),
        *(pytest.param(*shape, torch.float16, 2**-9, marks=pytest.mark.gpu) for shape in LARGE),
    ],
)
@pytest.mark.parametrize("with_norm", [True, False])
def test_q_is_returned_and_k_and_v_are_written_to_their_places(
    implementation, heads, kv_heads, head_dim, dtype, tolerance, with_norm
):
    qkv = randn(5, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[:, 3:]
    locations = [5 * PAGE_SIZE + 3, 0, NOWHERE, 2 * PAGE_SIZE, 17]
    norms = norms_of(head_dim, with_norm, dtype)
    check(qkv, kv_heads, head_dim, [7, 0, 900, 3, 1015], locations, norms, tolerance)


@pytest.mark.parametrize("heads, kv_heads, head_dim, pairs", [(4, 2, 16, 2), (3, 1, 24, 9)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_with_fewer_angles_only_the_first_numbers_of_a_head_are_rotated(
    implementation, heads, kv_heads, head_dim, pairs, with_norm
):
    qkv, norms = randn(4, (heads + 2 * kv_heads) * head_dim), norms_of(head_dim, with_norm)
    check(qkv, kv_heads, head_dim, [7, 0, 90, 3], [9, NOWHERE, 0, 17], norms, 1e-5, pairs)


@pytest.mark.parametrize("pairs", [8, 3])
def test_gates_between_the_queries_are_skipped(implementation, pairs):
    heads, kv_heads, head_dim = 3, 2, 16
    norms = norms_of(head_dim)
    packed = randn(4, 2 * heads + 2 * kv_heads, head_dim)
    without = torch.cat((packed[:, : 2 * heads : 2], packed[:, 2 * heads :]), dim=1)
    angles, locations = torch.rand(2, 4, pairs, device=DEVICE), torch.arange(4, device=DEVICE)
    layers = [kv_layer(kv_heads, head_dim)[0] for _ in range(2)]
    expected = rope_and_store(without.flatten(1), angles, layers[0], locations, **norms)
    packed[:, 1 : 2 * heads : 2] = math.nan
    q = rope_and_store(packed.flatten(1), angles, layers[1], locations, **norms, gated=True)
    assert torch.equal(q, expected)
    assert torch.equal(*(layer.nan_to_num() for layer in layers))
    odd = packed[:, 1:].flatten(1)
    check_refused("does not fit", rope_and_store, odd, angles, layers[1], locations, gated=True)


@pytest.mark.parametrize("locations", [[NOWHERE, 9, NOWHERE], [NOWHERE] * 3, []])
def test_a_padding_token_has_a_query_and_its_k_and_v_are_not_written(implementation, locations):
    qkv = randn(len(locations), (2 + 2 * 2) * 8)
    check(qkv, 2, 8, [0] * len(locations), locations, {}, 1e-5)


@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32])
def test_half_precision_is_rounded_after_the_norm_and_after_the_rotation(
    implementation, norm_dtype
):
    """Compared with float32 with explicit rounding."""
    heads, kv_heads, head_dim, num_tokens = 5, 2, 48, 4
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.float16)
    weights = randn(2, head_dim, dtype=norm_dtype)
    angles = torch.rand(2, num_tokens, head_dim // 2, device=DEVICE)
    kv, _ = kv_layer(kv_heads, head_dim, dtype=torch.float16)
    locations = torch.arange(num_tokens, device=DEVICE)
    q = rope_and_store(qkv, angles, kv, locations, q_norm=weights[0], k_norm=weights[1], eps=EPS)
    packed = qkv.view(num_tokens, -1, head_dim)[:, : heads + kv_heads].float()
    scale = torch.rsqrt(packed.pow(2).mean(-1, keepdim=True) + EPS)
    weight = weights.repeat_interleave(torch.tensor([heads, kv_heads], device=DEVICE), dim=0)
    rounded = ((packed * scale).to(norm_dtype) * weight).half().float()
    low, high = rounded.chunk(2, dim=-1)
    cos, sin = angles.unsqueeze(2)
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).half()
    actual = torch.cat((q, kv[0, :, 0].transpose(0, 1)), dim=1)
    # Another order of summation rarely rounds differently. Another order of roundings often does.
    assert (actual != expected).float().mean() < 0.01
    torch.testing.assert_close(actual, expected)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    kv = kv_layer(2, 8)[0].cpu()
    angles, locations, good = torch.zeros(2, 3, 4), torch.arange(3), torch.zeros(3, 8 * 8)
    check_refused("does not fit", rope_and_store, torch.zeros(3, 4 * 8), angles, kv, locations)
    check_refused("does not fit", rope_and_store, good.half(), angles, kv, locations)
    check_refused("does not fit", rope_and_store, good.t().contiguous().t(), angles, kv, locations)
    check_refused("angles", rope_and_store, good, torch.zeros(2, 2, 4), kv, locations)
    check_refused("angles", rope_and_store, good, torch.zeros(2, 3, 5), kv, locations)
    check_refused("int64", rope_and_store, good, angles, kv, locations.int())
    one, short = torch.ones(8), torch.ones(1)
    check_refused("together", rope_and_store, good, angles, kv, locations, q_norm=one)
    norms = {"q_norm": one, "k_norm": short}
    check_refused("norms", rope_and_store, good, angles, kv, locations, **norms)
    check_refused("kv", rope_and_store, good, angles, kv[:, :, 0], locations)

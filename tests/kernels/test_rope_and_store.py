"""QK-norm, rotation and the write into pages, against complex numbers token by token."""

import math

import pytest
import torch

from kernels.rope import rope_angles
from kernels.rope_and_store import rope_and_store

PAGE_SIZE = 4


def kv_layer(kv_heads, head_dim, num_pages=6, num_layers=3, layer=1):
    """One layer's strided view of a pool of NaN, and the pool."""
    pool = torch.full((num_pages, kv_heads, num_layers, 2, PAGE_SIZE, head_dim), math.nan)
    return pool[:, :, layer], pool


def rotated(x, position, frequencies):
    """[heads, head_dim] in float64: pairs (i, i + d/2) as complex numbers, turned."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[:, :half].double(), x[:, half:].double())
    turned = numbers * torch.polar(torch.ones(half).double(), position * frequencies.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


def normed(x, weight):
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(1, 1, 2), (4, 2, 6), (6, 1, 32)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_q_comes_back_and_k_and_v_go_to_their_places(heads, kv_heads, head_dim, with_norm):
    num_tokens = 5
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim)
    frequencies = torch.rand(head_dim // 2)
    positions = torch.tensor([7, 0, 900, 3, 4], dtype=torch.int32)
    locations = torch.tensor([5 * PAGE_SIZE + 3, 0, 9, 2 * PAGE_SIZE, 17])
    norms = {}
    if with_norm:
        norms = {"q_norm": torch.randn(head_dim), "k_norm": torch.randn(head_dim), "eps": 1e-6}
    kv, pool = kv_layer(kv_heads, head_dim)
    q = rope_and_store(qkv, rope_angles(positions, frequencies, 1.0), kv, locations, **norms)
    packed = qkv.view(num_tokens, -1, head_dim)
    for token in range(num_tokens):
        own_q, own_k, own_v = packed[token].split((heads, kv_heads, kv_heads))
        if with_norm:
            own_q, own_k = normed(own_q, norms["q_norm"]), normed(own_k, norms["k_norm"])
        position = int(positions[token])
        page, offset = divmod(int(locations[token]), PAGE_SIZE)
        for actual, expected in (
            (q[token], rotated(own_q, position, frequencies)),
            (kv[page, :, 0, offset], rotated(own_k, position, frequencies)),
            (kv[page, :, 1, offset], own_v.double()),
        ):
            torch.testing.assert_close(actual.double(), expected, atol=2e-4, rtol=1e-4)
    written = num_tokens * 2 * kv_heads * head_dim
    assert int((~pool.isnan()).sum()) == written, "something else was written too"


def test_the_scale_multiplies_cosines_and_sines():
    positions, frequencies = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1.0, 0.1])
    plain = rope_angles(positions, frequencies, 1.0)
    torch.testing.assert_close(rope_angles(positions, frequencies, 1.25), 1.25 * plain)
    torch.testing.assert_close(plain[1, 1], torch.tensor([math.sin(5.0), math.sin(0.5)]))


def test_wrong_shapes_are_refused():
    kv, _ = kv_layer(2, 8)
    angles = torch.zeros(2, 3, 4)
    locations = torch.arange(3)
    good = torch.zeros(3, 8 * 8)
    with pytest.raises(ValueError, match="does not fit"):
        rope_and_store(torch.zeros(3, 4 * 8), angles, kv, locations)
    with pytest.raises(ValueError, match="angles"):
        rope_and_store(good, torch.zeros(2, 2, 4), kv, locations)
    with pytest.raises(ValueError, match="int64"):
        rope_and_store(good, angles, kv, locations.int())
    with pytest.raises(ValueError, match="together"):
        rope_and_store(good, angles, kv, locations, q_norm=torch.ones(8))
    with pytest.raises(ValueError, match="kv"):
        rope_and_store(good, angles, kv[:, :, 0], locations)

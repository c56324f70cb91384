"""Keys and values in 8 bits: the stored numbers, and attention to them."""

import math

import pytest
import torch

from kernels import device
from kernels.attention import tiles
from kernels.layers.rope import rope_angles
from kernels.narrow import NARROW, KVScales, narrowed
from kernels.pages.rope_and_store import rope_and_store
from kernels.pages.store_kv import store_kv
from kernels.pages.store_latents import rope_and_store_latents
from tests.kernels.attention.attention_case import Case
from tests.kernels.conftest import DEVICE

# Chunks, one with a cached prefix and one without, then decode rows, and padding.
ROWS = [(21, 21), (17, 90), (1, 3), (1, 0), (1, 100)]
PAGE_SIZE, NUM_PAGES = 4, 6
LOCATIONS = [9, -1, 0, 23, 10]
SCALES = KVScales(key=2.0, value=0.25)

# Triton's interpreter rounds to 8 bits incorrectly, and has no NaN in them. So its tests check only
# where numbers are written, and the reference tests rounding, which the processor does.
ROUNDS = {"reference", "compiled"} if DEVICE.type == "cpu" else {"reference", "triton"}
each_dtype = pytest.mark.parametrize("kept_in", sorted(NARROW, key=str), ids=str)


def pool(kept_in, *shape):
    """Return one layer's pages of NaN."""
    if kept_in not in NARROW:
        return torch.full((NUM_PAGES, *shape), math.nan, dtype=kept_in, device=DEVICE)
    return torch.full((NUM_PAGES, *shape), 0x7F, dtype=torch.uint8, device=DEVICE).view(kept_in)


def numbers(implementation, kept_in, *shape):
    drawn = 8 * torch.randn(shape, device=DEVICE)
    return drawn if implementation in ROUNDS else narrowed(drawn, 1.0, kept_in).float()


def at(kv, location):
    page, offset = divmod(location, PAGE_SIZE)
    return kv[page, :, :, offset]


def turns(implementation):
    """Return positions of the tokens. If nothing may be rounded, all are 0."""
    turned = torch.arange(len(LOCATIONS), dtype=torch.int32, device=DEVICE)
    return turned * (implementation in ROUNDS)


def locations():
    return torch.tensor([0, *LOCATIONS], device=DEVICE)[1:]


def check_stored(kv, exact, scales):
    """Check that every token of `exact`, a pool in float32, is in kv in 8 bits, and nothing
    else."""
    for location in LOCATIONS:
        if location < 0:
            continue
        for vector, scale in enumerate(scales):
            expected = narrowed(at(exact, location)[:, vector], scale, kv.dtype)
            assert torch.equal(at(kv, location)[:, vector].float(), expected.float())
            at(kv, location)[:, vector].view(torch.uint8).fill_(0x7F)
    assert kv.float().isnan().all()


@each_dtype
def test_keys_and_values_are_stored_by_their_scales(implementation, kept_in):
    k, v = (numbers(implementation, kept_in, len(LOCATIONS), 3, 16) for _ in "kv")
    kept, exact = (pool(dtype, 3, 2, PAGE_SIZE, 16) for dtype in (kept_in, torch.float32))
    store_kv(k, v, kept, locations(), SCALES)
    store_kv(k, v, exact, locations())
    check_stored(kept, exact, (SCALES.key, SCALES.value))


@each_dtype
def test_keys_are_rotated_before_they_are_rounded(implementation, kept_in):
    if implementation == "compiled":
        pytest.skip("of numbers that are kept as they are")
    qkv = numbers(implementation, kept_in, len(LOCATIONS), (4 + 2 * 2) * 8)
    positions = turns(implementation)
    angles = rope_angles(positions, torch.rand(4, device=DEVICE), 1.0)
    kept, exact = (pool(dtype, 2, 2, PAGE_SIZE, 8) for dtype in (kept_in, torch.float32))
    q = rope_and_store(qkv, angles, kept, locations(), scales=SCALES)

    torch.testing.assert_close(q, rope_and_store(qkv, angles, exact, locations(), scales=SCALES))
    check_stored(kept, exact, (SCALES.key, SCALES.value))


@each_dtype
def test_latents_are_stored_without_a_scale(implementation, kept_in):
    kv, q = (numbers(implementation, kept_in, len(LOCATIONS), *size) for size in ((24,), (3, 8)))
    angles = rope_angles(turns(implementation), torch.rand(4, device=DEVICE), 1.0)
    norm, out = torch.rand(16, device=DEVICE), torch.empty_like(q)
    if implementation not in ROUNDS:
        kv[:, :16] = kv[:, :1].sign()  # so is the result of the norm
        norm.fill_(1.0)
    kept, exact = (pool(dtype, 1, 1, PAGE_SIZE, 24) for dtype in (kept_in, torch.float32))
    for latents in (kept, exact):
        rope_and_store_latents(
            kv, norm, 0.0, q, angles, latents, locations(), out, interleaved=True
        )
    check_stored(kept, exact, (1.0,))


# Seen failing with a plain cast: 448 and more is NaN in e4m3, and infinite in e5m2.
@each_dtype
def test_numbers_over_the_range_become_the_largest_one_and_nan_stays(implementation, kept_in):
    most = torch.finfo(kept_in).max
    k = torch.tensor([1e6, -1e6, math.nan, 1.0], device=DEVICE).expand(1, 1, 4)
    kept = pool(kept_in, 1, 2, PAGE_SIZE, 4)
    store_kv(k, k, kept, torch.tensor([0, 0], device=DEVICE)[1:])
    for stored in at(kept, 0)[0].float():
        assert stored[:2].tolist() == [most, -most]
        assert stored[3] == 1.0 and (stored[2].isnan() or implementation not in ROUNDS)


@each_dtype
@pytest.mark.parametrize("value_dim", [None, 24])
def test_attention_to_8_bits_equals_that_to_the_same_numbers(implementation, kept_in, value_dim):
    shape = {"heads": 6, "kv_heads": 2 if value_dim is None else 1, "head_dim": 32}
    Case(ROWS, **shape, value_dim=value_dim, kept_in=kept_in).check(window=None)


@each_dtype
def test_bfloat16_queries_are_multiplied_with_8_bits_in_float16(monkeypatch, kept_in):
    """The interpreter multiplies like a GPU, instead of in float32, but has no assembly. Numbers
    over the range of float16 become its largest ones."""
    if device.INTERPRETED:
        monkeypatch.setattr(tiles, "_widened", lambda x, wanted, rows: x.to(wanted))
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(device, "architecture", lambda: 90)
    monkeypatch.setattr(device, "shared_bytes", lambda: 232448)
    monkeypatch.setattr(device, "INTERPRETED", False)
    case = Case(ROWS, heads=6, kv_heads=2, head_dim=32, dtype=torch.bfloat16, kept_in=kept_in)
    case.check(atol=2e-2, rtol=2e-2)
    case.q[0] = 1e30
    assert case.attend().isfinite().all()


@each_dtype
def test_with_a_window_a_cap_and_sinks(implementation, kept_in):
    case = Case(ROWS, heads=6, kv_heads=2, head_dim=32, kept_in=kept_in)
    case.check(window=20, soft_cap=3.0, sinks=torch.randn(6, device=DEVICE))


@pytest.mark.parametrize("kept_in", [torch.float16, torch.int8], ids=str)
def test_pages_of_other_dtypes_accept_only_their_own_dtype(kept_in):
    kv = torch.zeros(NUM_PAGES, 1, 2, PAGE_SIZE, 8, dtype=kept_in)
    x = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="does not fit"):
        store_kv(x, x, kv, torch.zeros(1, dtype=torch.int64))

"""Writing K and V unchanged into pages of NaN."""

import math

import pytest
import torch

from kernels.pages.store_kv import store_kv
from tests.kernels.conftest import DEVICE

PAGE_SIZE = 4


def pool(kv_heads, head_dim, dtype=torch.float32):
    """Return one layer's strided view of a pool of NaN, and the pool."""
    whole = torch.full((6, kv_heads, 3, 2, PAGE_SIZE, head_dim), math.nan, device=DEVICE)
    whole = whole.to(dtype)
    return whole[:, :, 1], whole


def heads_first(num_tokens, kv_heads, dim, dtype=torch.float32):
    """Return [num_tokens, kv_heads, dim] stored like in transformers' attention: heads before
    tokens."""
    return torch.randn(kv_heads, num_tokens, dim, device=DEVICE).to(dtype).transpose(0, 1)


@pytest.mark.parametrize("locations", [[9, -1, 0, 23, 10], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads, k_dim, v_dim", [(1, 16, 16), (3, 24, 16), (5, 5, 24)])
def test_every_token_is_at_its_location_with_zeros_behind_and_no_other_byte_is_written(
    implementation, kv_heads, k_dim, v_dim, dtype, locations
):
    k, v = (heads_first(len(locations), kv_heads, dim, dtype) for dim in (k_dim, v_dim))
    kv, whole = pool(kv_heads, 24, dtype)
    store_kv(k, v, kv, torch.tensor([0, *locations], device=DEVICE)[1:])
    for token, location in enumerate(locations):
        if location < 0:
            continue
        for half, x in enumerate((k, v)):
            stored = kv[location // PAGE_SIZE, :, half, location % PAGE_SIZE]
            assert torch.equal(stored[:, : x.shape[2]], x[token])
            assert not stored[:, x.shape[2] :].any()
            stored.fill_(math.nan)
    assert whole.isnan().all()


@pytest.mark.parametrize(
    "k, v, locations",
    [
        (torch.zeros(2, 3, 8), torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 9), torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 8).half(), torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 16)[..., ::2], torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 8), torch.zeros(3, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_wrong_shapes_strides_and_dtypes_are_rejected(k, v, locations):
    with pytest.raises(ValueError, match=r"expected|does not fit"):
        store_kv(k, v, pool(2, 8)[0], locations)

"""Pipeline depth of attention: as deep as useful and as shared memory allows."""

import pytest

from kernels import device
from kernels.attention.tiles import stages_that_fit

LATENTS = {
    "rows": 32,
    "keys": 32,
    "head_dim": 512,
    "rest": 64,
    "apart": False,
    "kept": 2,
    "computed": 2,
}
HEADS = {
    "rows": 128,
    "keys": 32,
    "head_dim": 128,
    "rest": 0,
    "apart": True,
    "kept": 2,
    "computed": 2,
}


@pytest.mark.parametrize(
    "shape, shared_bytes, stages",
    [
        (LATENTS, 232448, 3),
        (LATENTS, 166912, 3),
        (LATENTS, 112640, 3),  # the exact size of three stages
        (LATENTS, 112639, 2),
        (LATENTS, 101376, 2),
        (LATENTS, 65536, 1),
        (LATENTS, 1024, 1),  # too small for any kernel, which the launch reports
        (HEADS, 101376, 3),
        (HEADS | {"head_dim": 256}, 101376, 1),
        (HEADS | {"kept": 1}, 101376, 3),
        (HEADS | {"kept": 4, "computed": 4}, 101376, 1),
    ],
)
def test_stages_follow_the_shared_memory_of_the_device(monkeypatch, shape, shared_bytes, stages):
    monkeypatch.setattr(device, "shared_bytes", lambda: shared_bytes)
    assert stages_that_fit(3, **shape) == stages
    assert stages_that_fit(1, **shape) == 1

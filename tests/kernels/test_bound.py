"""Bound launchers choose the same compiled kernel as Triton, for any arguments."""

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.bound import BoundKernel
from tools.bench.resources.compilation import AbsentDevice


def _kernel(
    x_ptr, y_ptr, count, stride, scale, NAME: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
) -> None:
    pass


class Made:
    """A compiled kernel as its launcher gets it."""

    packed_metadata = "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.function = self
        self._launches = launches

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        x, y, z, stream, function, metadata, _, _, _, *values = args
        assert (stream, function, metadata) == (0, self, "metadata")
        self._launches.append((self, (x, y, z), *values))


@pytest.fixture
def launches():
    """Return the launches: compiled kernel, grid, and values of all parameters."""
    launches: list[tuple[Any, ...]] = []

    def compiled(function: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Made:
        return function.device_caches[device][0].setdefault(key, Made(launches))

    driver.set_active(AbsentDevice(90))
    try:
        with mock.patch.object(JITFunction, "_do_compile", compiled):
            yield launches
    finally:
        driver.set_active(None)


MEMORY = torch.zeros(4096, dtype=torch.uint8)
POINTERS = [
    *(MEMORY[start:][:64] for start in (0, 16, 32, 8, 4)),
    *(MEMORY[start:][:64].view(torch.int32) for start in (0, 64, 8)),
    *(MEMORY[start:][:64].view(torch.bfloat16) for start in (0, 2)),
    None,
]
NUMBERS = [0, 1, 2, 3, 16, 17, 32, 4096, -16, -1, -(1 << 31), (1 << 31) - 1, 1 << 31, 1 << 40, 1e-5]
SCALES = [0.5, 1.0, 2.0, 1, True]
NAMES = ["silu", "gelu", 1, 1.0, True, torch.float32]


@pytest.mark.parametrize("options", [{}, {"do_not_specialize": ["y_ptr", "count"]}])
def test_a_bound_kernel_launches_what_triton_would(launches, options):
    """Arguments differ in dtypes, alignment and constants. Each is also launched by Triton,
    which must choose the same kernel."""
    own, rng = JITFunction(_kernel, **options), random.Random(0)
    bound, searches = BoundKernel(own), 0
    for _ in range(1500):
        args = [rng.choice(POINTERS), rng.choice(POINTERS), rng.choice(NUMBERS)]
        args += [rng.choice(NUMBERS[:5]), rng.choice(SCALES)]
        constants = {"WIDTH": rng.choice([64, 128]), "EARLY": rng.random() < 0.5}
        constants |= {"num_warps": rng.choice([4, 8]), "NAME": rng.choice(NAMES)}
        constants["enable_fp_fusion"] = True
        grid = (3, 5)[: rng.randrange(1, 3)]
        searches += bound[grid](*args, **constants) is not None
        own[grid](*args, **constants)
        mine, other = launches[-2:]
        assert mine[:2] == other[:2]
        values = [*args, constants["NAME"], constants["WIDTH"], constants["EARLY"]]
        assert mine[2:] == other[2:] == tuple(values)
    assert len({made for made, *_ in launches}) > 300
    assert searches < 1500


def test_a_known_launch_does_not_call_triton(launches):
    own = JITFunction(_kernel)
    bound, args = BoundKernel(own), (MEMORY, MEMORY, 5, 16, 0.5, "silu", 64, True)
    others, options = (MEMORY, 7, 32, 2.0, "silu", 64, True), {"enable_fp_fusion": True}
    bound[(1,)](*args, num_warps=4, **options)
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError):
        bound[(1,)](*args, num_warps=4, **options)
        bound[(1,)](MEMORY[32:], *others, num_warps=4, **options)
        with pytest.raises(AssertionError):
            bound[(1,)](MEMORY[8:], *others, num_warps=4, **options)
        with pytest.raises(AssertionError):
            bound[(1,)](*args, num_warps=8, **options)
    assert len(launches) == 3


def test_a_profiler_of_launches_sees_every_launch(launches):
    bound, seen = BoundKernel(JITFunction(_kernel)), mock.Mock()
    args = MEMORY, MEMORY, 5, 16, 0.5, "silu", 64, True
    bound[(1,)](*args, enable_fp_fusion=True)
    with mock.patch.object(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[seen])):
        with mock.patch.object(JITFunction, "run", seen):
            bound[(1,)](*args, enable_fp_fusion=True)
    assert seen.call_count == 1

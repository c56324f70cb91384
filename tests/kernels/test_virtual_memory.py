"""Device memory that is released and allocated again at the same addresses."""

import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import triton

from kernels.cuda.driver import CudaError, OutOfDeviceMemory
from tests.support.hardware.virtual_memory import GARBAGE, UNIT, host_memory

SUPPORT = Path(__file__).parents[1] / "support/hardware"
HEADERS = Path(triton.__file__).parent / "backends/nvidia/include"


def test_memory_is_allocated_again_at_the_same_address_without_its_content():
    memory = host_memory()
    region = memory.reserve(3 * UNIT + 1)
    assert (region.num_bytes, region.mapped_bytes) == (4 * UNIT, 0)
    region.map()
    tensor, address = region.tensor(UNIT, UNIT), region.address
    tensor.fill_(7)
    region.release()
    assert memory.driver.free_bytes() == memory.driver.total and not memory.mapped_bytes
    region.map()
    assert region.address == address and tensor.data_ptr() == address + UNIT
    assert bool((tensor == GARBAGE).all()) and memory.mapped_bytes == 4 * UNIT


def test_released_memory_cannot_be_accessed():
    script = """
from tests.support.hardware.virtual_memory import UNIT, host_memory
region = host_memory().reserve(UNIT)
region.map()
tensor = region.tensor(0, UNIT)
print(int(tensor[5]), flush=True)
region.release()
print(int(tensor[5]), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, f"{GARBAGE}\n"), ended.stderr


def test_a_repeated_release_or_allocation_does_nothing():
    memory = host_memory()
    region = memory.reserve(3 * UNIT, UNIT)
    region.release()
    region.map()
    region.tensor(0, UNIT).fill_(7)
    before = list(memory.driver.log)
    region.map()
    assert memory.driver.log == before and int(region.tensor(0, UNIT)[0]) == 7
    region.release()
    before = list(memory.driver.log)
    region.release()
    assert memory.driver.log == before


def test_memory_grows_by_extents():
    memory = host_memory()
    region = memory.reserve(5 * UNIT, 2 * UNIT)
    mapped = []
    for wanted in (1, 2 * UNIT, 2 * UNIT + 1, 5 * UNIT):
        region.map(wanted)
        mapped.append(region.mapped_bytes // UNIT)
    assert mapped == [2, 2, 4, 5]
    assert sorted(memory.driver.handles.values()) == [UNIT, 2 * UNIT, 2 * UNIT]


@pytest.mark.parametrize("name", ["create", "map", "allow"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_failure_in_the_middle_is_undone_and_can_be_retried(name, number):
    memory = host_memory()
    region = memory.reserve(4 * UNIT, UNIT)
    region.map(UNIT)
    region.tensor(0, UNIT).fill_(7)
    driver = memory.driver
    held = dict(driver.handles), dict(driver.mapped)
    driver.fails = lambda called, count: (called, count) == (name, number + 1)
    with pytest.raises(CudaError, match=f"{name}: failed"):
        region.map()
    assert (driver.handles, driver.mapped) == held
    assert memory.mapped_bytes == region.mapped_bytes == UNIT
    assert int(region.tensor(0, UNIT)[0]) == 7
    region.map()
    assert region.mapped_bytes == memory.mapped_bytes == 4 * UNIT


def test_too_little_memory_is_an_error_with_the_numbers():
    memory = host_memory(total=6 * UNIT)
    region = memory.reserve(8 * UNIT, 2 * UNIT)
    region.map(2 * UNIT)
    with pytest.raises(OutOfDeviceMemory, match=r"^0\.01 GiB are needed, 0\.01 GiB are free$"):
        region.map()
    assert memory.driver.free_bytes() == 4 * UNIT
    memory.driver.total = 8 * UNIT
    region.map()


def test_the_device_ends_its_work_before_memory_is_unmapped():
    memory = host_memory()
    region = memory.reserve(2 * UNIT, UNIT)
    region.map()
    region.release()
    log = memory.driver.log
    assert log.index("settle") < log.index("unmap")
    assert ("unmap", "release") in pairwise(log) and ("release", "unmap") in pairwise(log)


def test_regions_are_counted_together():
    memory = host_memory()
    one, other = memory.reserve(UNIT), memory.reserve(2 * UNIT)
    one.map()
    other.map()
    assert memory.mapped_bytes == 3 * UNIT
    one.release()
    assert memory.mapped_bytes == 2 * UNIT


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compile a library that replaces the driver's, with its header. Return its directory."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("library")
    source, made = SUPPORT / "cuda_library.c", directory / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-Wall", "-Werror", f"-I{HEADERS}"]
    subprocess.run([compiler, *options, str(source), "-o", str(made)], check=True)
    return directory


CALLS = """
import ctypes
from kernels.cuda.driver import OutOfDeviceMemory
from kernels.cuda.virtual_memory import virtual_memory
memory = virtual_memory(3)
region = memory.reserve(5 << 20, 2 << 20)
region.map()
ctypes.memset(region.address, 7, region.num_bytes)
region.release()
assert memory.driver.free_bytes() == 1 << 30
region.map()
assert ctypes.string_at(region.address, 2) == bytes(2)
assert memory.driver.free_bytes() == (1 << 30) - (6 << 20) == (1 << 30) - memory.mapped_bytes
try:
    memory.reserve(2 << 30).map()
except OutOfDeviceMemory as error:
    print(error)
region.release()
print("released", flush=True)
ctypes.string_at(region.address, 2)
"""


def test_calls_have_the_arguments_of_the_drivers_header(library):
    ended = subprocess.run(
        [sys.executable, "-c", CALLS],
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "2.00 GiB are needed, 0.99 GiB are free\nreleased\n"
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, said), ended.stderr


@pytest.mark.gpu
def test_a_gpu_keeps_the_addresses():
    import torch

    from kernels.cuda.virtual_memory import virtual_memory

    torch.zeros(1, device="cuda:0")
    memory = virtual_memory(0)
    region = memory.reserve(256 << 20, 64 << 20)
    free = memory.driver.free_bytes()
    region.map()
    assert memory.driver.free_bytes() <= free - (256 << 20)
    tensor = region.tensor(0, region.num_bytes)
    tensor.fill_(7)
    assert int(tensor[-1]) == 7 and tensor.data_ptr() == region.address
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    region.release()
    assert memory.driver.free_bytes() >= free - (8 << 20)
    region.map()
    tensor.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((tensor == 2).all())
    region.release()

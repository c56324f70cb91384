"""Part machine: the ceilings of this GPU, which are the denominators of all other figures.

A ceiling is the best result of simple programs here, not a data sheet figure: copies, a reduction
that mostly reads, and a large matrix product. Also measures the cost of a launch, alone and as a
graph node, and the link to host memory.
"""

import time
from collections.abc import Callable, Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device as kernel_device
from tools.bench.gpu.process import Row, guarded, note
from tools.bench.gpu.setting import Floor, Setting, Work


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    if not setting.dry:
        properties = torch.cuda.get_device_properties(setting.device)
        yield {
            "table": "device",
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
            "l2_mib": properties.L2_cache_size / 2**20,
            "capability": f"{properties.major}.{properties.minor}",
        }
    for what in (_copies, _reads, _products, _host_link, _launches):
        yield from guarded(what.__name__, what(setting))


def ceilings_of(rows: list[Row]) -> dict[str, float]:
    """Return the highest measured rate of each kind. 0: not measured."""
    best = dict.fromkeys(("copy", "read", "matmul"), 0.0)
    for row in rows:
        if (kind := row.get("ceiling")) is not None:
            best[kind] = max(best[kind], row["rate"] / Floor(kind, 1.0).rate(1.0)["rate"])
    return best


def _copies(setting: Setting) -> Iterator[Row]:
    source = setting.randn(setting.sized(2 << 30, 1 << 12))
    target = torch.empty_like(source)
    ways: dict[str, Work] = {
        "torch copy_": lambda: target.copy_(source),
        "torch neg": lambda: torch.neg(source, out=target),
    }
    yield from _ceilings(setting, Floor("copy", 2.0 * source.nbytes), "copy on the device", ways)


def _reads(setting: Setting) -> Iterator[Row]:
    numbers = torch.empty(setting.sized(2 << 30, 1 << 14), device=setting.device)
    numbers.uniform_(-1.0, 1.0)
    expected = float(numbers.sum(dtype=torch.float64))
    size = kernel_device.num_multiprocessors(setting.device)
    ways = {
        f"{programs} programs, blocks of {block}": _reader(numbers, programs, block)
        for programs, block in ((4 * size, 4096), (8 * size, 4096), (16 * size, 2048))
    }
    ways["torch sum"] = numbers.sum
    for by, work in ways.items():
        error = abs(float(work().sum(dtype=torch.float64)) - expected)
        if error < 1.0:  # one missing block is a difference of about 40
            floor = Floor("read", numbers.nbytes)
            yield from _ceilings(setting, floor, "reading only", {by: work})
        else:
            yield note(f"reading by {by}", f"wrong: the sum is off by {error:.2g}")


def _reader(numbers: Tensor, programs: int, block: int) -> Callable[[], Tensor]:
    sums = torch.empty(programs, device=numbers.device)

    def work() -> Tensor:
        _sum_kernel[(programs,)](numbers, sums, numbers.numel() // block, BLOCK=block, num_warps=8)
        return sums

    return work


def _products(setting: Setting) -> Iterator[Row]:
    size = setting.sized(8192, 64)
    a, b = setting.randn(size, size), setting.randn(size, size)
    floor, ways = Floor("matmul", 2.0 * size**3), {"torch mm": lambda: torch.mm(a, b)}
    yield from _ceilings(setting, floor, f"matrix product, {size} cubed", ways, cold=False)


def _host_link(setting: Setting) -> Iterator[Row]:
    on_host = torch.ones(setting.sized(1 << 30, 1 << 12), dtype=torch.uint8)
    on_host = on_host if setting.dry else on_host.pin_memory()
    on_device = torch.empty_like(on_host, device=setting.device)
    ways: dict[str, Work] = {
        "host to device, pinned": lambda: on_device.copy_(on_host, non_blocking=True),
        "device to host, pinned": lambda: on_host.copy_(on_device, non_blocking=True),
    }
    for what, work in ways.items():
        by = {"one block of 1 GiB": work}
        (row,) = _ceilings(setting, Floor("copy", on_host.nbytes), what, by)
        del row["ceiling"]  # this is the link's rate, not the device memory's
        yield row


def _ceilings(
    setting: Setting, floor: Floor, what: str, ways: Mapping[str, Work], *, cold: bool = True
) -> Iterator[Row]:
    for by, work in ways.items():
        work()
        timing = setting.clock.time(work, cold=cold)
        yield {
            "table": "ceilings",
            "ceiling": floor.ceiling,
            "what": what,
            "by": by,
            **floor.rate(timing.p50),
            "ms": timing.p50 * 1e3,
        }


def _launches(setting: Setting) -> Iterator[Row]:
    launches = setting.sized(2000, 3)
    word = torch.zeros(1, dtype=torch.int32, device=setting.device)

    def work() -> None:
        for _ in range(launches):
            _empty_kernel[(1,)](word)

    def row(what: str, seconds: float) -> Row:
        us = seconds / launches * 1e6
        return {"table": "launches", "what": what, "us": us, "launches": launches}

    work()
    setting.finish()
    began = time.perf_counter()
    work()
    enqueued = time.perf_counter()
    setting.finish()
    done = time.perf_counter()
    yield row("Triton launch, the host's time", enqueued - began)
    yield row("Triton launches in a row, until all are done", done - began)
    if setting.dry:
        yield note("nodes of a CUDA graph", "not in the dry mode")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    timing = setting.clock.time(graph.replay, cold=False)
    yield row("node of a CUDA graph, an empty kernel", timing.p50)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(x_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum every num_programs-th block in each Triton program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    x_ptr += program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(program, num_blocks, programs):
        total += tl.load(x_ptr)
        x_ptr += programs.to(tl.int64) * BLOCK
    tl.store(sums_ptr + program, tl.sum(total))


@triton.jit
def _empty_kernel(word_ptr):  # type: ignore[no-untyped-def]
    pass

"""Part transfer: reads pages of the device from another process, over each data path.

The path is the one that the backend has proved and names. For comparison, one kernel gathers the
same scattered pages, within this process and from the other's memory if the device shares it (CUDA
IPC). No method is faster. On one device, both are copies within its memory. Rates count payload
bytes: a copy within a memory reads and writes each of them.
"""

import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.errors import TransferError
from kvtransfer.backends.base import BackendConnection, Ints
from tools.bench.gpu.operation import difference
from tools.bench.gpu.process import Row, guarded, note
from tools.bench.gpu.setting import Setting
from tools.bench.gpu.systems.producer import (
    ProducerProcess,
    backends,
    content,
    pool_of,
    producer_process,
)

PAGE_BYTES = 147456 * 16  # 16 tokens of Qwen3-4B and 8B
COUNTS = (512, 64, 8, 1)
ROUNDS = 5

Read = Callable[[Ints, Ints], None]


def measure(setting: Setting) -> Iterator[Row]:
    sources = [setting.device]
    if not setting.dry and torch.cuda.device_count() > 1:
        sources.append(torch.device("cuda:1"))
    for source in sources:
        yield from guarded(f"reads from {source}", _from_device(setting, source))


def _from_device(setting: Setting, source: torch.device) -> Iterator[Row]:
    page_bytes, counts = setting.sized((PAGE_BYTES, COUNTS), (4096, (4, 1)))
    num_pages = max(counts)
    expected = content(setting.device, page_bytes, num_pages)
    landing = torch.zeros_like(expected)
    with ExitStack() as exits:
        producer = exits.enter_context(producer_process(source, page_bytes, num_pages))
        reads = _raw_reads(setting, producer, expected, landing)
        for name in backends():
            started = time.perf_counter()
            try:
                connection = _connected(producer, name, landing, exits)
                probe = connection.probe()
            except (TransferError, ModuleNotFoundError) as error:
                yield note(f"{name} from {source}", f"cannot: {error}")
                continue
            reads[f"{name}, {connection.path}"] = connection.copy
            yield {
                "table": "paths",
                "source": str(source),
                "backend": name,
                "path": connection.path,
                "probe_gib_per_s": probe,
                "connect_s": time.perf_counter() - started,
            }
        producer.stop_polling()
        for by in list(reads):
            if (wrong := _wrong_share(setting, reads[by], expected, landing)) > 0.0:
                yield note(f"{by} from {source}", f"{wrong:.2%} of the bytes are wrong")
                del reads[by]
        for count in counts:
            for row in _rows(setting, reads, count, num_pages):
                size = count * page_bytes
                rates = {"mib": size / 2**20, "gb_per_s": size / row["us"] / 1e3}
                yield {"table": "reads", "source": str(source), **row, **rates}


def _rows(setting: Setting, reads: dict[str, Read], count: int, num_pages: int) -> Iterator[Row]:
    """Yield a row per path.

    The paths take turns in rounds, so that changes of the machine's speed affect all of them.
    """
    rng = np.random.default_rng(count)
    seconds: dict[str, list[float]] = {by: [] for by in reads}
    for _ in range(setting.sized(ROUNDS, 1)):
        pages = [rng.permutation(num_pages)[:count].astype(np.int32) for _ in range(2)]
        for by, read in reads.items():
            setting.finish()
            started = time.perf_counter()
            read(*pages)
            seconds[by].append(time.perf_counter() - started)
    median = {by: statistics.median(times) for by, times in seconds.items()}
    raw = min(median[by] for by in median if by.startswith("raw"))
    for by, read_s in median.items():
        yield {"by": by, "pages": count, "us": read_s * 1e6, "of_raw": raw / read_s}


def _raw_reads(
    setting: Setting, producer: ProducerProcess, expected: Tensor, landing: Tensor
) -> dict[str, Read]:
    reads: dict[str, Read] = {
        "raw gather, this process": partial(_gather, setting, expected, landing)
    }
    if producer.served.shared:
        import torch.multiprocessing  # noqa: F401  teaches pickle to find shared tensors

        theirs: Tensor = pickle.loads(producer.served.shared)
        reads["raw gather, CUDA IPC"] = partial(_gather, setting, theirs, landing)
    return reads


def _gather(
    setting: Setting, source: Tensor, landing: Tensor, from_pages: Ints, to_pages: Ints
) -> None:
    """Gather pages into the first pages of `landing`, whatever their destination, with one kernel,
    complete on return."""
    ids = torch.from_numpy(from_pages).to(source.device)
    target = landing[: len(ids)]
    if source.device == landing.device:
        torch.index_select(source, 0, ids, out=target)
    else:
        target.copy_(source.index_select(0, ids))
    setting.finish()


def _connected(
    producer: ProducerProcess, name: str, landing: Tensor, exits: ExitStack
) -> BackendConnection:
    if name in producer.served.missing:
        raise TransferError(producer.served.missing[name])
    connection = backends()[name].connect(
        producer.served.descriptions[name], producer.remote, pool_of(landing)
    )
    exits.callback(connection.close)
    return connection


def _wrong_share(setting: Setting, read: Read, expected: Tensor, landing: Tensor) -> float:
    """Return the share of wrong bytes after each page was read to its own number."""
    landing.zero_()
    setting.finish()
    pages = np.arange(len(expected), dtype=np.int32)
    read(pages, pages)
    return difference(landing, expected)

"""The producer's process of the part transfer: serves device pages over every backend.

    python -m tools.bench.gpu.systems.producer DEVICE PAGE_BYTES NUM_PAGES

Prints its connection data on one line of stdout. Polls until all consumers have connected, when it
reads a line from stdin, and ends at the end of stdin. Its pages hold the bytes of `content`.
"""

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from common.errors import TransferError
from kvtransfer.backends.base import PagePool, PageProducer, PoolRegion, TransferBackend
from kvtransfer.backends.nixl.backend import NixlBackend
from kvtransfer.backends.tcp.backend import TcpBackend
from tools.bench.support.record import ROOT

PRODUCER, CONSUMER = 2, 1  # instance ids
_POLL_S = 0.001


class Served(msgspec.Struct):
    """The output of the producer's process. missing: why a backend is absent. shared: pickled
    data with which torch opens the pool in another process, or empty if the device cannot share
    memory."""

    base: int
    descriptions: dict[str, bytes]
    missing: dict[str, str]
    shared: bytes


def backends() -> dict[str, TransferBackend]:
    known: tuple[TransferBackend, ...] = (NixlBackend(), TcpBackend("127.0.0.1"))
    return {backend.name: backend for backend in known}


def content(device: torch.device, page_bytes: int, num_pages: int) -> Tensor:
    """Return uint8 [num_pages, page_bytes], the same in every process on a device of this kind."""
    generator = torch.Generator(device).manual_seed(7)
    shape = (num_pages, page_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def pool_of(pages: Tensor) -> PagePool:
    num_pages, page_bytes = pages.shape
    return PagePool(pages.data_ptr(), page_bytes, num_pages, str(pages.device))


class ProducerProcess(NamedTuple):
    """A running producer's process, made by `producer_process`."""

    stdin: IO[bytes]
    served: Served
    remote: PoolRegion

    def stop_polling(self) -> None:
        """Stop its polling, so that it is as idle as a serving node's producer."""
        self.stdin.write(b"\n")
        self.stdin.flush()


@contextlib.contextmanager
def producer_process(
    device: torch.device, page_bytes: int, num_pages: int
) -> Iterator[ProducerProcess]:
    """Start the producer's process. Raises RuntimeError if it does not start."""
    numbers = (device, page_bytes, num_pages)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.gpu.systems.producer", *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the producer's process ended with {process.wait(10)}")
        served = msgspec.json.decode(line, type=Served)
        remote = PoolRegion(served.base, page_bytes, num_pages)
        yield ProducerProcess(process.stdin, served, remote)
    process.wait(10)


def main(device_name: str, page_bytes: str, num_pages: str) -> None:
    device = torch.device(device_name)
    pages = content(device, int(page_bytes), int(num_pages))
    producers: dict[str, PageProducer] = {}
    missing: dict[str, str] = {}
    for name, backend in backends().items():
        try:
            producers[name] = backend.serve(pool_of(pages), PRODUCER)
            producers[name].prepare(CONSUMER).result()
            if (publications := producers[name].publications) is not None:
                publications.publish(CONSUMER, np.arange(len(pages), dtype=np.int32))
        except (TransferError, ModuleNotFoundError) as error:
            missing[name] = str(error)
    descriptions = {name: producer.admit(CONSUMER) for name, producer in producers.items()}
    served = Served(pages.data_ptr(), descriptions, missing, _shared(pages))
    print(msgspec.json.encode(served).decode(), flush=True)
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        for producer in producers.values():
            producer.poll()
    sys.stdin.read()  # until the other end closes it
    for producer in producers.values():
        producer.close()


def _shared(pages: Tensor) -> bytes:
    if pages.device.type == "cpu":
        return b""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401  teaches the pickler to share tensors

    return bytes(ForkingPickler.dumps(pages))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The memory of an engine's pages on the device and in host memory, and the stream of its
forwards."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from engine.kv_cache.kv import HostPool, KVPool
from engine.offload.page_files import FileThreads, PageFiles
from engine.runner.copier import Copier, PageCopier
from engine.runner.stream import DeviceStream, open_stream
from engine.sizing import EngineShape
from kernels.cuda.virtual_memory import VirtualMemory


@dataclass(frozen=True, slots=True, eq=False)
class TorchBackend:
    """Page pools, their copies, and a forward stream."""

    shape: EngineShape
    pool: KVPool
    host_pool: HostPool
    copier: Copier
    stream: DeviceStream

    @classmethod
    def open(
        cls,
        shape: EngineShape,
        stream: DeviceStream | None = None,
        memory: VirtualMemory | None = None,
    ) -> Self:
        """Allocate all pages.

        Args:
            stream: stream of the forwards. None: a new stream of the device.
            memory: see KVPool.
        Raises:
            ConfigError: there is not enough memory.
        """
        pool = KVPool(shape.layout, shape.num_pages, shape.device, memory)
        host_pool = HostPool(shape.layout, shape.num_host_pages, shape.device)
        copier = PageCopier(pool, host_pool)
        return cls(shape, pool, host_pool, copier, stream or open_stream(shape.device))

    def with_host_pages(self, num_pages: int) -> Self:
        """Return this backend with a new pool of `num_pages` host pages for retracted requests.

        Raises:
            ConfigError: there is not enough memory.
        """
        shape = replace(self.shape, host_pages=num_pages)
        host_pool = HostPool(shape.layout, shape.num_host_pages, shape.device)
        copier = PageCopier(self.pool, host_pool)
        return replace(self, shape=shape, host_pool=host_pool, copier=copier)

    def open_files(self, root: Path, version: bytes, num_bytes: int) -> FileThreads:
        """Open the files of the file tier, see PageFiles."""
        memory = self.host_pool.tensor.numpy()
        files = PageFiles(root, memory, version=version, num_bytes=num_bytes)
        return FileThreads(files, lambda: self.copier.notify())

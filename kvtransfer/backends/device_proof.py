"""Proof that a consumer's GPU can read a producer's device memory, and the mapping of that memory.
Used for the data paths cuda_ipc and nvlink.

The producer writes random bytes into its scratch pages. It sends these bytes and handles of its
memory over the pair stream. The consumer maps the memory behind the handles. If it finds the same
bytes there, both processes are on one host and the device can read the memory.

The mappings last as long as the connection. UCX maps memory for each read and keeps nothing mapped
(nixl/agent.py), which is cheap only if the memory is already mapped. Closing the connection unmaps
everything, so the memory of a dead producer is freed.
"""

import contextlib
import os
from typing import Annotated

import msgspec
import torch

from common.errors import TransferError
from kvtransfer.backends import cuda_driver
from kvtransfer.backends.base import PagePool, parse_description
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.backends.path_proof import HostLocation, Nonce, check_shared_memory, prove_same_host

_NONCE_BYTES = 32


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An address that other processes of this host may map."""

    handle: Annotated[
        bytes,
        msgspec.Meta(min_length=cuda_driver.HANDLE_BYTES, max_length=cuda_driver.HANDLE_BYTES),
    ]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]

    @classmethod
    def at(cls, address: int) -> "SharedMemory":
        """Share an address on the current device. Raises TransferError if that fails."""
        handle, offset = cuda_driver.share(address)
        return cls(handle, offset)


class DeviceLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The location of a producer's pool and scratch pages, and the first bytes of the latter."""

    process: HostLocation
    device_uuid: Annotated[
        bytes, msgspec.Meta(min_length=cuda_driver.UUID_BYTES, max_length=cuda_driver.UUID_BYTES)
    ]
    pool: SharedMemory
    scratch: SharedMemory
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class DeviceEvidence:
    """The producer's evidence: memory handles and random bytes. Valid as long as this object and
    both memories live.
    """

    def __init__(self, pool: PagePool, scratch: PagePool) -> None:
        """Raises TransferError if the memory cannot be shared or no nixl agent can be created."""
        check_shared_memory()
        device = cuda_device(pool.device)
        device.use()
        self._nonce = os.urandom(_NONCE_BYTES)
        device.write(scratch, torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8))
        self._device_uuid = cuda_driver.device_uuid(device.index)
        self._pool, self._scratch = SharedMemory.at(pool.base), SharedMemory.at(scratch.base)

    def describe(self, metadata: bytes) -> bytes:
        self._process = Nonce(metadata)
        return msgspec.msgpack.encode(
            DeviceLocation(
                process=self._process.place(),
                device_uuid=self._device_uuid,
                pool=self._pool,
                scratch=self._scratch,
                nonce=self._nonce,
            )
        )


class MappedMemory:
    """A consumer's mapping of a producer's pool and scratch pages. Not thread-safe."""

    def __init__(self, description: bytes, metadata: bytes, pool: PagePool) -> None:
        """Map the memory. Raises TransferError if the pool's device cannot read it."""
        place = parse_description("cuda_ipc", description, DeviceLocation)
        check_shared_memory()
        prove_same_host(place.process, metadata)
        self._device = cuda_device(pool.device)
        self._device.use()
        self._mapped: list[int] = []
        try:
            self._mapped.append(cuda_driver.map_shared(place.pool.handle))
            self._mapped.append(cuda_driver.map_shared(place.scratch.handle))
            found = self._device.read(self._mapped[-1] + place.scratch.offset, _NONCE_BYTES)
            if found != place.nonce:
                raise TransferError("the memory behind its handle is not the producer's")
        except BaseException:
            self.close()
            raise
        ours = cuda_driver.device_uuid(self._device.index)
        nvlink = ours != place.device_uuid and cuda_driver.joined_by_nvlink(ours, place.device_uuid)
        self.path = "nvlink" if nvlink else "cuda_ipc"

    def close(self) -> None:
        """Unmap the memory, after the last read. Idempotent."""
        while self._mapped:
            # Unmapping the memory of a dead producer may fail, which is harmless.
            with contextlib.suppress(TransferError):
                cuda_driver.unmap_shared(self._mapped.pop())

"""The tensors of a safetensors checkpoint, in one file or in shards with an index.

This module knows names, shapes and bytes of tensors, but not their meaning. Each file is opened
once.
"""

import contextlib
import copy
import json
import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor
from xxhash import xxh3_128

from common.errors import ConfigError, InvalidRequest
from common.requests.namespace import WeightsId

MOST_OPEN = 16  # open shards: a model is read roughly in their order


class OpenFiles:
    """Files that stay open between reads. For any thread. The end of the context closes them.

    Args:
        most: maximum of open files. Beyond it, the least recently read one is closed.
    """

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._close_beyond(0)

    def map(self, path: Path, offset: int, num_bytes: int) -> memoryview:
        """Return bytes of the file, at least one, mapped copy-on-write.

        Exactly these bytes stay mapped until the last reference to them is gone.

        Raises:
            OSError: the file cannot be read.
        """
        page_start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset - page_start + num_bytes
        with self._opened(path) as descriptor:
            try:
                mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=page_start)
            except ValueError as error:
                raise OSError(f"{path} is truncated") from error
        return memoryview(mapped)[offset - page_start :]

    def ask_for(self, path: Path, offset: int, num_bytes: int) -> None:
        """Ask the operating system to read these bytes ahead.

        Raises:
            OSError: the file cannot be read, or its file system does not support such hints.
        """
        with self._opened(path) as descriptor:
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        """Yield the file's descriptor, which stays open until the context is left."""
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.move_to_end(path)
            try:
                yield self._descriptors[path]
            finally:
                self._close_beyond(self._most)

    def _close_beyond(self, most: int) -> None:
        while len(self._descriptors) > most:
            os.close(self._descriptors.popitem(last=False)[1])


_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # limit of the format
_BLOCK_BYTES = 8 << 20
FLOATS = ("F32", "F16", "BF16")
LENGTH_BYTES = 8  # in front of a file's header
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_SIZES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}

FileStamps: TypeAlias = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor that a model needs, with its allowed dtypes and shapes."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    or_shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in a file.

    Attributes:
        offset, num_bytes: range of its bytes in `path`.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element, or 1 if the dtype is unknown."""
        return _SIZES.get(self.dtype, 1)

    def blocks(self, num_bytes: int) -> Iterator[bytes]:
        """Yield all bytes of the tensor, in blocks of `num_bytes`.

        Raises:
            OSError: the file is too short.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.num_bytes
            while left:
                block = file.read(min(num_bytes, left))
                if not block:
                    raise OSError(f"{self.path} is truncated")
                left -= len(block)
                yield block


class Checkpoint:
    """The stored tensors of a directory by name."""

    def __init__(self, directory: Path, files: Sequence[Path] | None = None) -> None:
        """Read the index and the headers, not the tensors.

        Args:
            files: the files of the checkpoint. None: those of a model.
        Raises:
            ConfigError: there is no safetensors checkpoint, or it is damaged.
        """
        self._directory = directory
        self._reads: Callable[[str], None] | None = None
        self._files = OpenFiles(0)
        self.tensors: dict[str, StoredTensor] = {}
        for path in _files(directory) if files is None else files:
            self.tensors.update(_whole(path))

    def has_floats(self, name: str) -> bool:
        """Return whether the tensor exists and has at least 16 bits per number."""
        return name in self.tensors and self.tensors[name].dtype in FLOATS

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the tensor's two dimensions. Raises ConfigError if it is not a matrix."""
        shape = self.tensors[name].shape
        if len(shape) != 2:
            raise ConfigError(f"{self._directory}: {name} has shape {shape}, expected a matrix")
        return shape[0], shape[1]

    def check(
        self,
        expected: Mapping[str, TensorRequest],
        ignored: frozenset[str],
        unused: tuple[str, ...] = (),
    ) -> None:
        """Raise ConfigError unless the tensors are exactly the expected ones, with their shapes.

        Args:
            ignored, unused: suffixes and prefixes of names that are allowed in addition.
        """
        missing = sorted(expected.keys() - self.tensors.keys())
        unexpected = sorted(
            name
            for name in self.tensors.keys() - expected.keys()
            if not name.endswith(tuple(ignored)) and not name.startswith(unused)
        )
        for what, names in (("misses", missing), ("has unexpected", unexpected)):
            if names:
                raise ConfigError(
                    f"{self._directory}: the checkpoint {what} {len(names)} tensors: "
                    f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
                )
        for name, wanted in expected.items():
            stored = self.tensors[name]
            if stored.shape not in (wanted.shape, *wanted.or_shapes):
                raise ConfigError(
                    f"{self._directory}: {name} has shape {stored.shape}, the configuration "
                    f"expects {wanted.shape}"
                )
            if stored.dtype not in wanted.dtypes:
                raise ConfigError(
                    f"{self._directory}: {name} is {stored.dtype}, supported are "
                    f"{', '.join(wanted.dtypes)}"
                )

    def watched(self, reads: Callable[[str], None] | None, files: OpenFiles) -> "Checkpoint":
        """Return the same checkpoint, whose shards `files` keeps open between reads.

        Args:
            reads: called with the name of each tensor before it is read.
        """
        watched = copy.copy(self)
        watched._reads = reads
        watched._files = files
        return watched

    def read(self, name: str) -> Tensor:
        """Return the tensor in its own dtype, mapped from the file. Copy it before the file may
        change.

        Raises:
            ConfigError: its dtype is not supported.
            OSError: the file was removed or truncated.
        """
        if self._reads is not None:
            self._reads(name)
        stored = self.tensors[name]
        if (dtype := _DTYPES.get(stored.dtype)) is None:
            supported = ", ".join(_DTYPES)
            raise ConfigError(f"{stored.path}: {name} is {stored.dtype}, supported are {supported}")
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=dtype)
        mapped = self._files.map(stored.path, stored.offset, stored.num_bytes)
        return torch.frombuffer(mapped, dtype=dtype).view(stored.shape)


def holds_weights(name: str) -> bool:
    """Return whether a file with this name, in a model's directory, has tensors or is their
    index."""
    return name == _INDEX or name.endswith(".safetensors")


def file_stamps(directory: Path) -> FileStamps:
    """Return size, time of the last change in ns, and inode of each file with tensors, by name."""
    stamps = {}
    for path in directory.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # the file was removed
            stat = path.stat()
            stamps[path.name] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return stamps


def stored_names(directory: Path) -> Collection[str]:
    """Return the names of a checkpoint's tensors, or none if it has no weights.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    if not any((directory / name).exists() for name in (_INDEX, SINGLE)):
        return ()
    return Checkpoint(directory).tensors


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise ConfigError(f"{directory}: has neither {SINGLE} nor {_INDEX}")
        return [directory / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: not an index of safetensors shards ({error!r})") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ConfigError(f"{index}: shard {name!r} does not exist")
    return [directory / name for name in names]


def _whole(path: Path) -> dict[str, StoredTensor]:
    tensors = _header(path)
    end, size = _end(tensors), path.stat().st_size
    if end > size:
        raise ConfigError(f"{path}: truncated, it has {size} of {end} bytes")
    return tensors


def file_bytes(path: Path) -> int:
    """Return the size of a file in bytes according to its header, which may exceed the bytes that
    are present.

    Raises:
        ConfigError: the file is not a safetensors file.
    """
    return _end(_header(path))


def header_bytes(start: bytes) -> int:
    """Return the length in bytes of the header that follows these LENGTH_BYTES. Raises ValueError
    above the format's limit."""
    length = int.from_bytes(start, "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    return length


def _end(tensors: Mapping[str, StoredTensor]) -> int:
    return max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)


def _header(path: Path) -> dict[str, StoredTensor]:
    """Read a file's header.

    Format: 8 bytes of length (little-endian), JSON, then the bytes to which its offsets refer.
    """
    try:
        with path.open("rb") as file:
            length = header_bytes(file.read(LENGTH_BYTES))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        base = LENGTH_BYTES + length
        tensors = {name: _stored(path, base, entry) for name, entry in header.items()}
        _check_places(tensors, base)
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a safetensors file ({error})") from error


def _check_places(tensors: Mapping[str, StoredTensor], base: int) -> None:
    """Raise ValueError unless the tensors are consecutive from `base` on, as the format
    requires."""
    end = base
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if tensor.offset != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += tensor.num_bytes


def _stored(path: Path, base: int, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    expected = math.prod(shape) * _SIZES[dtype] if dtype in _SIZES else end - begin
    if begin < 0 or expected < 0 or expected != end - begin:
        raise ValueError(f"bytes {begin} to {end} for {dtype} {shape}")
    return StoredTensor(path, dtype, shape, base + begin, end - begin)


def content(stored: Mapping[str, StoredTensor]) -> WeightsId:
    """Return a hash of all bytes of the tensors.

    Raises:
        OSError: a file cannot be read, or is truncated.
    """
    digest = xxh3_128()
    for name, tensor in stored.items():
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        for block in tensor.blocks(_BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def below(root: Path, path: str, field: str, flag: str) -> Path:
    """Return the resolved path if it is below `root`.

    Args:
        root: resolved.
        path: absolute, or relative to `root`.
        field, flag: names of the path and of the root in the error.
    Raises:
        InvalidRequest: the path is outside `root`.
    """
    try:
        directory = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest(f"{field}: not a path") from None
    if root not in directory.parents:
        raise InvalidRequest(f"{field}: it is outside {flag}")
    return directory


# Errors of damaged files, whatever reads them.
UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)


@contextmanager
def refusing(field: str, hidden: str) -> Iterator[None]:
    """Raise all errors of files that a client named as InvalidRequest, so that no defect of a file
    stops the engine.

    Args:
        field: name of the client's field, with which the message begins.
        hidden: text to remove from messages, such as the path of a directory.
    """
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        raise InvalidRequest(f"{field}: {str(error).replace(hidden, '')}") from None
    except UNREADABLE as error:
        kind = type(error).__name__
        raise InvalidRequest(f"{field}: the files cannot be read ({kind})") from error

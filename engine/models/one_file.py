"""The stored tensors of a model as one safetensors file, for the transfer of weights between nodes.

A node exports its weights in this form, independent of their files. The receiving node keeps them
in memory.
"""

import json
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from engine.models.checkpoint import (
    LENGTH_BYTES,
    SINGLE,
    StoredTensor,
    file_bytes,
    header_bytes,
    holds_weights,
)

_ALIGNED = 8  # bytes, for readers that map the file


class OneFile:
    """A virtual file with the given tensors. Equal tensors give equal bytes.

    Attributes:
        num_bytes: size of the whole file.

    Args:
        held: context that is entered for each read. Raises OSError if the source files are gone.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        held: AbstractContextManager[object] | None = None,
    ) -> None:
        self._held = nullcontext() if held is None else held
        # Large elements first, so that every tensor is aligned to its dtype.
        names = sorted(stored, key=lambda name: (-stored[name].item_bytes, name))
        entries, ends = {}, [0]
        for name in names:
            tensor = stored[name]
            place, end = ends[-1], ends[-1] + tensor.num_bytes
            where = {"shape": tensor.shape, "data_offsets": (place, end)}
            entries[name] = {"dtype": tensor.dtype, **where}
            ends.append(end)
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._head = len(text).to_bytes(LENGTH_BYTES, "little") + text
        self._tensors = [stored[name] for name in names]
        base = len(self._head)
        self._starts = [base + end for end in ends[:-1]]
        self.num_bytes = base + ends[-1]

    def read(self, start: int, buffer: memoryview) -> int:
        """Fill the buffer with the bytes from `start` on. Return their number, which is smaller at
        the end.

        Raises:
            OSError: a source file was removed or truncated.
        """
        with self._held:
            return self._read(start, buffer)

    def _read(self, start: int, buffer: memoryview) -> int:
        num_bytes = max(0, min(len(buffer), self.num_bytes - start))
        head = self._head[start : start + num_bytes]
        buffer[: len(head)] = head
        done = len(head)
        while done < num_bytes:
            number = bisect_right(self._starts, start + done) - 1
            tensor, within = self._tensors[number], start + done - self._starts[number]
            length = min(num_bytes - done, tensor.num_bytes - within)
            with tensor.path.open("rb", buffering=0) as file:
                file.seek(tensor.offset + within)
                got = file.readinto(buffer[done : done + length])
            if not got:
                raise OSError(f"{tensor.path} is truncated")
            done += got
        return num_bytes


class ReceivedFile:
    """A checkpoint directory whose weights are in this process's memory and arrive in pieces.

    The creator closes it. One thread at a time may enter the context, which keeps the directory
    open. Entering a closed one raises OSError.

    Args:
        like: a directory of the same model, with all files except weights.
    """

    def __init__(self, like: Path) -> None:
        self._file = os.memfd_create("weights")
        try:
            self._place = tempfile.TemporaryDirectory(prefix="baton-weights-")
        except OSError:
            os.close(self._file)
            raise
        self.directory = Path(self._place.name)
        for each in like.iterdir():
            if each.is_file() and not holds_weights(each.name):
                (self.directory / each.name).symlink_to(each.resolve())
        self._path = self.directory / SINGLE
        self._path.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")  # other ranks read it
        self._entered = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._entered.acquire()
        if self._closed:
            self._entered.release()
            raise FileNotFoundError("weights from another node are no longer stored")

    def __exit__(self, *_: object) -> None:
        self._entered.release()

    def write(self, start: int, data: memoryview) -> None:
        """Write received bytes. Raise OSError if there is not enough memory."""
        while data:
            written = os.pwrite(self._file, data, start)
            start, data = start + written, data[written:]

    def expected_bytes(self) -> int | None:
        """Return the size of the whole file, or None until its header is complete.

        The header must be received from its start on.

        Raises:
            ConfigError: the bytes are not a safetensors header.
        """
        start = os.pread(self._file, LENGTH_BYTES, 0)
        with suppress(ValueError):  # `file_bytes` reports that with a better message
            if os.fstat(self._file).st_size < LENGTH_BYTES + header_bytes(start):
                return None
        return file_bytes(self._path)

    def set_bytes(self, num_bytes: int) -> None:
        """Set the size, independent of the bytes written so far."""
        os.truncate(self._file, num_bytes)

    def close(self) -> None:
        """Close the file. Waits until the context is left, because its descriptor may be reused.

        The memory is freed when it is no longer mapped.
        """
        with self._entered:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                self._place.cleanup()

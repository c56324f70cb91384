"""The stored tensors of a model as one safetensors file: what a node lends of its weights, whatever
files these are in, and what another one has read of them, which it keeps in memory."""

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

_ALIGNED = 8  # bytes, for whoever maps the file


class OneFile:
    """The file that these tensors are, which is nowhere as such. The same for the same tensors.

    num_bytes: of all of it.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        held: AbstractContextManager[object] | None = None,
    ) -> None:
        """
        Args:
            held: entered while they are read; OSError: they are gone.
        """
        self._held = nullcontext() if held is None else held
        # Large elements first: then all are where their dtype may be.
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
        """Fills it with the bytes from `start` on; returns how many: fewer at the end.

        Raises:
            OSError: a file that they are in is gone, or cut off.
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
                raise OSError(f"{tensor.path} is cut off")
            done += got
        return num_bytes


class ReceivedFile:
    """A directory that is a checkpoint's, but that its weights are in this process's memory, and
    come piece by piece. Whoever has made it closes it; entered, by any one thread at a time, it
    stays open until it is left. To enter one that is closed is an OSError.

    Args:
        like: a directory of the same model: all that is no weights is there.
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
        self._path.symlink_to(f"/proc/self/fd/{self._file}")
        self._entered = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._entered.acquire()
        if self._closed:
            self._entered.release()
            raise FileNotFoundError("what came from another node is not kept any more")

    def __exit__(self, *_: object) -> None:
        self._entered.release()

    def write(self, start: int, data: memoryview) -> None:
        """Raises OSError: there is no memory for it."""
        while data:
            written = os.pwrite(self._file, data, start)
            start, data = start + written, data[written:]

    def expected_bytes(self) -> int | None:
        """Of the whole file, once all of its header is there, from its beginning on.

        Raises:
            ConfigError: it is no header of safetensors.
        """
        start = os.pread(self._file, LENGTH_BYTES, 0)
        with suppress(ValueError):  # which `file_bytes` tells better
            if os.fstat(self._file).st_size < LENGTH_BYTES + header_bytes(start):
                return None
        return file_bytes(self._path)

    def set_bytes(self, num_bytes: int) -> None:
        """It has so many, whatever was written."""
        os.truncate(self._file, num_bytes)

    def close(self) -> None:
        """Its memory is free once nobody has mapped it. Waits for who has entered it: what is at
        its number afterwards is another file."""
        with self._entered:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                self._place.cleanup()

"""Read-ahead of checkpoint files, and log lines with the progress of loading.

The system reads requested ranges on its own, so the disk works while earlier matrices are
converted. That takes no memory of this process.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from common.logs import kv
from engine.models.checkpoint import StoredTensor
from engine.models.open_files import OpenFiles

AHEAD_BYTES = 512 << 20
TOLD_EVERY_S = 10.0

log = logging.getLogger(__name__)


class ReadAhead:
    """The read-ahead of a checkpoint while a model is loaded.

    Args:
        tensors: by name, in the approximate order in which they will be read.
        files: keeps the shards open.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        files: OpenFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = {name: tensor.num_bytes for name, tensor in tensors.items()}
        self._total = sum(self._left.values())
        self._read = 0
        self._files = files
        self._coming = iter(tensors.values())
        self._asked = 0  # bytes
        self._clock = clock
        self._told = clock()

    def reads(self, name: str) -> None:
        """Note that a tensor is read now. Repeated calls for a tensor change nothing."""
        self._read += self._left.pop(name, 0)
        while self._asked < self._read + AHEAD_BYTES:
            tensor = next(self._coming, None)
            if tensor is None:
                break
            with contextlib.suppress(OSError):  # a file system without support for hints
                self._files.ask_for(tensor.path, tensor.offset, tensor.num_bytes)
            self._asked += tensor.num_bytes
        if self._clock() >= self._told + TOLD_EVERY_S:
            self._told = self._clock()
            share = f"{100 * self._read // self._total} %"
            log.info("weights %s", kv(read=share, mib=self._read >> 20, of_mib=self._total >> 20))

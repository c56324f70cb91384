"""Copies pieces of another node's weights out of the pages that they have come into, to a file in
this node's memory."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from common.errors import ConfigError, WrongState
from engine.batch.batch import Ints
from engine.models.one_file import ReceivedFile
from engine.sizing import free_bytes

_HOST = torch.device("cpu")


class WeightCopies:
    """One thread, which copies what it is given in order.

    Args:
        pool: memory of the pages, uint8 [num_pages, page_bytes].
        tell: called by that thread when something is done.
    """

    def __init__(self, pool: Tensor, tell: Callable[[], None]) -> None:
        self._pool = pool
        self._page_bytes = pool.shape[1]
        self._tell = tell
        self._worker = ThreadPoolExecutor(1, "weight reads")

    def copy(
        self, file: ReceivedFile, first: int, pages: Ints, num_bytes: int | None, lender: str
    ) -> Future[int | None]:
        """The pieces from that one on, which are in these pages; nothing else may be put there
        until it is done. Gives how many bytes the whole file has, once that can be known.

        Args:
            num_bytes: that it is known to have.
            lender: its address.
        Fails with:
            WrongState: there is no room for it, or it is no file of weights.
        """
        copying = self._worker.submit(self._copy, file, first, pages, num_bytes, lender)
        copying.add_done_callback(lambda _: self._tell())
        return copying

    def drop(self, file: ReceivedFile) -> None:
        """Closes it, behind what is being copied there."""
        self._worker.submit(file.close)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _copy(
        self, file: ReceivedFile, first: int, pages: Ints, num_bytes: int | None, lender: str
    ) -> int | None:
        start = first * self._page_bytes
        rows = self._pool[torch.from_numpy(pages).long()].to(_HOST)
        data = rows.numpy().data.cast("B")
        try:
            file.write(start, data if num_bytes is None else data[: num_bytes - start])
            if num_bytes is not None:
                return num_bytes
            expected = file.expected_bytes()
            if expected is not None:
                _check_room(expected)
                file.set_bytes(expected)
            return expected
        except ConfigError as error:
            reason = str(error).replace(f"{file.directory}/", "")
            raise WrongState(f"{lender}: {reason}") from error
        except OSError as error:
            raise WrongState(f"weights: there is no place for them here: {error}") from error


def _check_room(wanted: int) -> None:
    left = free_bytes(_HOST, 1.0)
    if wanted > left:
        raise WrongState(
            f"weights: {wanted / 2**30:.2f} GiB are wanted beside the present ones, "
            f"{left / 2**30:.2f} GiB are left"
        )

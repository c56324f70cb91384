"""Copies of another node's weights, from the pages in which the pieces arrived to a file in this
node's memory.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from common.errors import ConfigError, FailedPrecondition
from engine.batch.batch import Ints
from engine.models.one_file import ReceivedFile
from engine.sizing import free_bytes

_HOST = torch.device("cpu")


class WeightCopies:
    """The copies of arrived pieces. One thread does them in order.

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
        """Copy the pieces from `first` on out of these pages, which must not change until it is
        done. The Future has the number of bytes of the whole file, once that can be known, else
        None.

        Args:
            num_bytes: of the file, if known.
            lender: its address.
        Fails with:
            FailedPrecondition: there is no room for it, or it is not a file of weights.
        """
        copying = self._worker.submit(self._copy, file, first, pages, num_bytes, lender)
        copying.add_done_callback(lambda _: self._tell())
        return copying

    def drop(self, file: ReceivedFile) -> None:
        """Close the file after the copies to it in progress."""
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
            raise FailedPrecondition(f"{lender}: {reason}") from error
        except OSError as error:
            raise FailedPrecondition(
                f"weights: there is no place for them here: {error}"
            ) from error


def _check_room(wanted: int) -> None:
    left = free_bytes(_HOST, 1.0)
    if wanted > left:
        raise FailedPrecondition(
            f"weights: {wanted / 2**30:.2f} GiB are wanted beside the present ones, "
            f"{left / 2**30:.2f} GiB are left"
        )

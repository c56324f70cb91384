"""The interface of collectives between the ranks of a node, which all call them in the same
order."""

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Some ranks of a node. Forward stream only.

    Every call waits until the other ranks make the same call. It raises RankLost if one of them
    ends or times out. No further call is allowed then. On GPUs the stream waits instead of the
    host, and the process exits instead of raising an error.

    Attributes:
        rank: number of this rank in the group, from 0.
        size: number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on every rank.

        Args:
            x: contiguous, of the same shape and dtype on all ranks. May be overwritten.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks in rank order, concatenated along the last dimension.

        Args:
            x: contiguous, of the same shape and dtype on all ranks.
        """
        ...

    def broadcast(self, x: Tensor, sender: int = 0) -> Tensor:
        """Return the tensor of the rank `sender` on all ranks.

        Args:
            x: contiguous. On other ranks, any tensor of the same shape and dtype. It may be
                overwritten.
        """
        ...

    def close(self) -> None: ...

"""The tensors of steps in memory that all ranks share.

Packing a step into a block broadcasts it. A block is reused only when every rank has finished the
step in it.

The memory is not pinned for GPUs. `upload` packs a step into pinned memory when it is launched.
Pinning would occupy the whole ring, most of which is never used.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from engine.ranks.shm import new_memory

BLOCKS = 8  # rank 0 is at most three steps ahead of the last rank
_PAGE = 4096


def ring_memory(block_bytes: int) -> int:
    """Return the descriptor of new memory for a ring. `block_bytes`: a result of `whole_pages`."""
    return new_memory("baton-steps", BLOCKS * block_bytes)


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class StepRing:
    """The blocks by step number.

    Args:
        memory: descriptor from `ring_memory`. The caller may close it.
    """

    def __init__(self, memory: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        shared = mmap.mmap(memory, BLOCKS * block_bytes)
        self._blocks: NDArray[np.uint8] = np.frombuffer(shared, np.uint8).reshape(BLOCKS, -1)

    def block(self, number: int) -> NDArray[np.uint8]:
        """Return the block of step `number`, uint8 [block_bytes]."""
        block: NDArray[np.uint8] = self._blocks[number % BLOCKS]
        return block

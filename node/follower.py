"""The program of a rank that follows rank 0 of its node: `python -m node.follower DESCRIPTOR`.

Rank 0 starts it, never a user.
"""

import sys

from engine import follower
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.ranks import Share
from kvtransfer.backends.base import PagePool
from kvtransfer.transfer.follower import FollowerTransfer


def open_transfer(share: Share, pool: KVPool, whole: KVLayout) -> FollowerTransfer:
    """Open the part of hand-offs over one rank's pages."""
    pages = PagePool(pool.base_address, pool.page_bytes, pool.num_pages, str(pool.tensor.device))
    return FollowerTransfer(share.node_rank, share.node, pages, whole.pages_by_rank)


if __name__ == "__main__":
    follower.main(int(sys.argv[1]), open_transfer)

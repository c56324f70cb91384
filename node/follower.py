"""The process of a follower, that is, of any rank of a node but rank 0: `python -m node.follower
DESCRIPTOR,...`.

Rank 0 or a rank host starts it. A rank host adds the address at which other nodes read this rank's
pages.
"""

import sys
from functools import partial

from engine import follower
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.ranks import Share
from kvtransfer.backends.base import PagePool
from kvtransfer.transfer.follower import FollowerTransfer


def open_transfer(
    share: Share, pool: KVPool, whole: KVLayout, listen_host: str | None = None
) -> FollowerTransfer:
    """Create a follower's part in hand-offs, for the pages of one rank.

    Args:
        listen_host: see FollowerTransfer.
    """
    pages = PagePool(pool.base_address, pool.page_bytes, pool.num_pages, str(pool.tensor.device))
    return FollowerTransfer(share.node_rank, share.node, pages, whole.pages_by_rank, listen_host)


if __name__ == "__main__":
    _, descriptors, *listen_host = sys.argv
    opened = partial(open_transfer, listen_host=listen_host[0] if listen_host else None)
    follower.main([int(each) for each in descriptors.split(",")], opened)

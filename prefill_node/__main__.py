"""python -m prefill_node: a prefill node's front, which starts its engine."""

import sys
import time

from common import settings
from common.config import PrefillConfig
from common.errors import ServingError
from common.node import spans
from common.node.front import Front, NodeParts, run_node
from kvtransfer.pairs.dialer import PairDialer
from kvtransfer.pairs.named_owners import NamedOwners
from kvtransfer.pairs.service import PairService
from kvtransfer.pairs.streams import PairStreams
from prefill_node.pooling_service import PoolingService


def parts(front: Front, *, fetches: bool) -> NodeParts:
    """Readers call here for KV, and routers for vectors; this node calls whoever readers say has
    part of a prompt.

    Args:
        fetches: whether it does.
    """
    streams = PairStreams(
        front.transfer_socket,
        front.metrics,
        on_beat=lambda: front.supervision.beat(time.monotonic()),
    )
    dialer = PairDialer(streams, front.metrics, front.make_channel)
    owners = NamedOwners(front.address, dialer.dial)
    pairs = PairService(
        streams,
        front.engine.check_ready,
        front.supervision.check_length,
        on_named=owners.name if fetches else lambda addresses: None,
    )
    pooling = PoolingService(front.engine, front.supervision.check_length)

    def drain() -> None:
        pairs.drain()
        pooling.drain()

    def end(error: ServingError) -> None:
        streams.close_all(error)
        pooling.end(error)

    return NodeParts(
        services=(pairs.register, pooling.register),
        background=(streams.run, dialer.run),
        handoff=lambda handoff: spans.tell_handoff(front.tracer, handoff),
        pooled=pooling.pooled,
        drain=drain,
        end=end,
    )


def main() -> int:
    config = settings.read(PrefillConfig, "baton prefill", sys.argv[1:])
    # Over TLS it calls nobody whom it cannot check.
    fetches = config.sharing.enabled and (config.front.tls.cert is None or config.front.tls.mutual)
    return run_node(
        config,
        role="prefill",
        engine_module="prefill_node.engine",
        parts=lambda front: parts(front, fetches=fetches),
    )


if __name__ == "__main__":
    sys.exit(main())

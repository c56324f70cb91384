"""python -m prefill_node: a prefill node's front, which starts its engine."""

import sys
import time

from common import settings
from common.config import PrefillConfig
from common.errors import ServingError
from common.node import spans
from common.node.front import Front, NodeParts, run_node
from kvtransfer.pairs.service import PairService
from kvtransfer.pairs.streams import PairStreams
from prefill_node.pooling_service import PoolingService


def parts(front: Front) -> NodeParts:
    """Readers call here for KV, and routers for vectors."""
    streams = PairStreams(
        front.transfer_socket,
        front.metrics,
        on_beat=lambda: front.supervision.beat(time.monotonic()),
    )
    pairs = PairService(streams, front.engine.check_ready, front.supervision.check_length)
    pooling = PoolingService(front.engine, front.supervision.check_length)

    def drain() -> None:
        pairs.drain()
        pooling.drain()

    def end(error: ServingError) -> None:
        streams.close_all(error)
        pooling.end(error)

    return NodeParts(
        services=(pairs.register, pooling.register),
        background=(streams.run,),
        handoff=lambda handoff: spans.tell_handoff(front.tracer, handoff),
        pooled=pooling.pooled,
        drain=drain,
        end=end,
    )


def main() -> int:
    config = settings.read(PrefillConfig, "baton prefill", sys.argv[1:])
    return run_node(config, role="prefill", engine_module="prefill_node.engine", parts=parts)


if __name__ == "__main__":
    sys.exit(main())

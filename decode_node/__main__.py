"""python -m decode_node: a decode node's front, which starts its engine."""

import sys
import time

from common import settings
from common.config import DecodeConfig
from common.errors import ServingError
from common.node.front import Front, NodeParts, run_node
from decode_node.serve import ServeService
from kvtransfer.pairs.dialer import PairDialer
from kvtransfer.pairs.service import PairService
from kvtransfer.pairs.streams import PairStreams


def parts(front: Front, *, colocated: bool, falls_back: bool, fetches: bool) -> NodeParts:
    """Routers call here, and decode nodes that a request of this one goes to; this node calls the
    prefill nodes that routers name, and decode nodes that a request, or a prefix, comes from."""

    def beat() -> None:
        front.supervision.beat(time.monotonic())
        serve.beat()

    streams = PairStreams(front.transfer_socket, front.metrics, on_beat=beat)
    dialer = PairDialer(streams, front.metrics, front.make_channel)

    pairs = PairService(streams, front.engine.check_ready, front.supervision.check_length)

    def pair(prefill: frozenset[str], decode: frozenset[str]) -> None:
        dialer.dial(decode if colocated else prefill | decode)

    serve = ServeService(
        front.engine,
        front.metrics,
        front.supervision,
        front.tracer,
        serves_alone=colocated,
        falls_back=falls_back,
        fetches=fetches,
        on_peers=pair,
    )

    def end(error: ServingError) -> None:
        serve.end(error)
        streams.close_all(error)

    return NodeParts(
        services=(serve.register, pairs.register),
        background=(streams.run, dialer.run),
        step=serve.step,
        on_trial=serve.on_trial,
        moved=serve.moved,
        drain=serve.drain,  # whoever its requests go to still pairs with it
        end=end,
    )


def main() -> int:
    config = settings.read(DecodeConfig, "baton decode", sys.argv[1:])
    alone = config.mode == "colocated" or config.local_prefill_tokens > 0
    return run_node(
        config,
        role="decode",
        mode=config.mode,
        engine_module="decode_node.engine",
        parts=lambda front: parts(
            front,
            colocated=config.mode == "colocated",
            falls_back=config.local_fallback,
            fetches=config.sharing.enabled and alone,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())

"""python -m decode_node: a decode node's front, which starts its engine."""

import sys

from common.cli import settings
from common.config import DecodeConfig
from common.node.front import Front, NodeParts, run_node
from decode_node.serve import ServeService
from kvtransfer.pair_dialer import PairDialer
from kvtransfer.pair_streams import PairStreams


def parts(front: Front, *, colocated: bool) -> NodeParts:
    """Routers call here; this node calls the prefill nodes that they name."""
    streams = PairStreams(front.transfer_socket, front.metrics)
    dialer = PairDialer(streams, front.metrics)

    def pair(addresses: frozenset[str]) -> None:
        if not colocated:
            dialer.dial(addresses)

    serve = ServeService(front.engine, front.metrics, serves_alone=colocated, on_peers=pair)
    return NodeParts(
        services=(serve.register,),
        background=(streams.run, dialer.run),
        step=serve.step,
        moved=serve.moved,
        drain=serve.drain,
        end=serve.end,
    )


def main() -> int:
    config = settings.read(DecodeConfig, "baton decode", sys.argv[1:])
    return run_node(
        config,
        role="decode",
        mode=config.mode,
        engine_module="decode_node.engine",
        parts=lambda front: parts(front, colocated=config.mode == "colocated"),
    )


if __name__ == "__main__":
    sys.exit(main())

"""What a node's front does as a prefill node's."""

import time
from functools import partial

from common.config import PrefillConfig
from common.errors import ServingError, WrongState
from kvtransfer.pairs.dialer import PairDialer
from kvtransfer.pairs.named_owners import NamedOwners
from kvtransfer.pairs.service import PairService
from kvtransfer.pairs.streams import PairStreams
from node.frontend import spans
from node.frontend.parts import Front, NodeParts, RoleProgram
from prefill_node.pooling_service import PoolingService


def program(config: PrefillConfig) -> RoleProgram:
    # Over TLS it calls nobody whom it cannot check.
    calls = config.front.tls.cert is None or config.front.tls.mutual
    fetches = config.sharing.enabled and calls
    return RoleProgram("prefill", config, partial(_parts, calls=calls, fetches=fetches))


def _parts(front: Front, *, calls: bool, fetches: bool) -> NodeParts:
    """Readers call here for KV, and routers for vectors; this node calls whoever readers say has
    part of a prompt, and whose weights it is to take.

    Args:
        calls: whether it calls anybody.
        fetches: whether it calls for prompts.
    """
    streams = PairStreams(
        front.transfer_socket,
        front.metrics,
        on_beat=lambda late_s: front.supervision.beat(time.monotonic(), late_s),
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

    def pair_with(address: str) -> None:
        if not calls:
            raise WrongState("over TLS that is not mutual a prefill node calls no other")
        owners.name([address])

    def drain() -> None:
        pairs.drain()
        pooling.drain()

    def resume() -> None:
        pairs.resume()
        pooling.resume()

    def end(error: ServingError) -> None:
        streams.close_all(error)
        pooling.end(error)

    return NodeParts(
        services=(pairs.register, pooling.register),
        background=(streams.run, dialer.run),
        handoff=lambda handoff: spans.tell_handoff(front.tracer, handoff),
        pooled=pooling.pooled,
        pair_with=pair_with,
        drain=drain,
        resume=resume,
        end=end,
    )

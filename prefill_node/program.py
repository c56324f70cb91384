"""Services of a prefill node's process."""

import time
from functools import partial

from common.config import PrefillConfig
from common.errors import FailedPrecondition, ServingError
from kvtransfer.pairs.dialer import PairDialer
from kvtransfer.pairs.named_owners import NamedProducers
from kvtransfer.pairs.service import PairService
from kvtransfer.pairs.streams import PairStreams
from node.frontend import spans
from node.frontend.parts import NodeFrontend, RoleProgram, RoleServices
from prefill_node.pooling_service import PoolingServicer


def program(config: PrefillConfig) -> RoleProgram:
    # With TLS, it only calls nodes that it can authenticate.
    calls = config.server.tls.cert is None or config.server.tls.mutual
    fetches = config.prefix_sharing.enabled and calls
    return RoleProgram("prefill", config, partial(_parts, calls=calls, fetches=fetches))


def _parts(frontend: NodeFrontend, *, calls: bool, fetches: bool) -> RoleServices:
    """Connect the services of a prefill node.

    Incoming calls: consumers that want KV, and routers that want vectors. Outgoing calls: nodes
    that hold part of a prompt, as named by consumers, and nodes from which this node takes weights.

    Args:
        calls: whether it may call other nodes.
        fetches: whether it fetches prefixes of prompts.
    """
    streams = PairStreams(
        frontend.transfer_socket,
        frontend.metrics,
        on_beat=lambda late_s: frontend.supervision.beat(time.monotonic(), late_s),
    )
    dialer = PairDialer(streams, frontend.metrics, frontend.make_channel)
    owners = NamedProducers(frontend.address, dialer.dial)
    pairs = PairService(
        streams,
        frontend.engine.check_ready,
        frontend.supervision.check_length,
        on_named=owners.name if fetches else lambda addresses: None,
    )
    pooling = PoolingServicer(frontend.engine, frontend.supervision.check_length)

    def pair_with(address: str) -> None:
        if not calls:
            raise FailedPrecondition("over TLS that is not mutual a prefill node calls no other")
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

    return RoleServices(
        services=(pairs.register, pooling.register),
        background=(streams.run, dialer.run),
        handoff=lambda handoff: spans.tell_handoff(frontend.tracer, handoff),
        pooled=pooling.pooled,
        pair_with=pair_with,
        drain=drain,
        resume=resume,
        end=end,
    )

"""The gRPC services of a decode node's process."""

from functools import partial

from common.config import DecodeConfig
from common.errors import ServingError
from decode_node.servicer import DecodeAbilities, DecodeService
from kvtransfer.pairs.dialer import NamedProducers, PairDialer
from kvtransfer.pairs.streams import PairService, PairStreams
from node.frontend.engine_link import NodeFrontend, RoleProgram, RoleServices


def program(config: DecodeConfig) -> RoleProgram:
    colocated = config.mode == "colocated"
    abilities = DecodeAbilities(
        serves_alone=colocated,
        falls_back=config.local_fallback,
        fetches=config.prefix_sharing.enabled
        and (colocated or config.local_prefill_max_tokens > 0),
        takes_embeddings=config.engine.input_embeddings.enabled,
    )
    parts = partial(_parts, abilities=abilities)
    return RoleProgram("decode", config, parts, config.mode)


def _parts(frontend: NodeFrontend, *, abilities: DecodeAbilities) -> RoleServices:
    """Connect the services of a decode node.

    Incoming calls: routers, and decode nodes to which a request of this node migrates. Outgoing
    calls: prefill nodes named by routers, and decode nodes from which this node reads a request, a
    prefix or weights.
    """

    streams = PairStreams(frontend.transfer_socket, frontend.metrics)
    dialer = PairDialer(streams, frontend.metrics, frontend.make_channel)
    producers = NamedProducers(frontend.address, dialer.dial)
    pairs = PairService(streams, frontend.engine.check_ready, frontend.supervision.check_length)

    def pair(prefill: frozenset[str], decode: frozenset[str]) -> None:
        producers.listed(decode if abilities.serves_alone else prefill | decode)

    serve = DecodeService(
        frontend.engine,
        frontend.metrics,
        frontend.supervision,
        frontend.tracer,
        abilities=abilities,
        on_peers=pair,
    )

    def end(error: ServingError) -> None:
        serve.end(error)
        streams.close_all(error)

    return RoleServices(
        services=(serve.register, pairs.register),
        background=(partial(streams.run, serve.heartbeat), dialer.run),
        step=serve.step,
        on_quarantine=serve.on_quarantine,
        moved=serve.moved,
        pair_with=lambda address: producers.name([address]),
        drain=serve.drain,  # destinations of migrations can still pair while this node drains
        resume=serve.resume,
        end=end,
    )

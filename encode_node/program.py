"""The gRPC services of an encode node's process."""

from functools import partial

from common.config import EncodeConfig
from kvtransfer.pairs.streams import PairService, PairStreams
from node.frontend.engine_link import NodeFrontend, RoleProgram, RoleServices


def program(config: EncodeConfig) -> RoleProgram:
    return RoleProgram("encode", config, _parts)


def _parts(frontend: NodeFrontend) -> RoleServices:
    """Connect the services of an encode node. Its only callers are consumers of embeddings."""
    streams = PairStreams(frontend.transfer_socket, frontend.metrics)
    engine, supervision = frontend.engine, frontend.supervision
    pairs = PairService(streams, engine.check_ready, supervision.check_length)
    return RoleServices(
        services=(pairs.register,),
        background=(partial(streams.run, supervision.heartbeat),),
        drain=pairs.drain,
        resume=pairs.resume,
        end=streams.close_all,
    )

"""A node's server process over the stub engine. Its only argument is a DecodeConfig as JSON.

As a prefill node, it has only the services that all nodes have.
"""

import sys
from functools import partial

from common.config import DecodeConfig
from decode_node.servicer import DecodeAbilities, DecodeService
from kvtransfer.pairs.streams import PairStreams
from node.frontend.engine_link import NodeFrontend, RoleProgram, RoleServices
from node.frontend.frontend import EngineProcess, run_node


def parts(front: NodeFrontend) -> RoleServices:
    serve = DecodeService(
        front.engine,
        front.metrics,
        front.supervision,
        front.tracer,
        abilities=DecodeAbilities(serves_alone=True, falls_back=False, fetches=True),
        on_peers=lambda peers, _: print("peers", *sorted(peers), flush=True),
    )

    streams = PairStreams(front.transfer_socket, front.metrics)
    return RoleServices(
        services=[serve.register],
        background=[partial(streams.run, serve.heartbeat)],
        step=serve.step,
        on_quarantine=serve.on_quarantine,
        moved=serve.moved,
        drain=serve.drain,
        resume=serve.resume,
        end=serve.end,
    )


def other(role: str) -> RoleProgram:
    if role == "decode":
        return RoleProgram("decode", config, parts, "colocated")
    return RoleProgram("prefill", config, bare)


def bare(front: NodeFrontend) -> RoleServices:
    streams = PairStreams(front.transfer_socket, front.metrics)
    return RoleServices(services=[], background=[streams.run], end=streams.close_all)


if __name__ == "__main__":
    config = DecodeConfig.model_validate_json(sys.argv[1])
    sys.exit(
        run_node(
            RoleProgram("decode", config, parts, "colocated"),
            spawn=partial(EngineProcess, "tests.support.engine.stub_engine"),
            other=other,
        )
    )

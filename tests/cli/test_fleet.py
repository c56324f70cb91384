"""When a program that was restarted is back: as every process of every router sees it."""

import pytest

from cli.operating.fleet import Fleet
from common import rpc
from protos import router_pb2_grpc
from protos.router_pb2 import ClusterNode, GetClusterResponse, LinkState, RouterState

PREFILL, DECODE = "127.0.0.1:100", "127.0.0.1:200"
NODES = (
    ClusterNode(role="prefill", address=PREFILL, state="ready", instance_id=1),
    ClusterNode(
        role="decode",
        address=DECODE,
        state="ready",
        instance_id=2,
        links=[LinkState(peer=PREFILL)],
    ),
)
LATE = {
    "in use by no process": RouterState(),
    "in use by others": RouterState(in_use=[PREFILL]),
    "a process is silent": RouterState(in_use=[PREFILL, DECODE], silent_processes=1),
}


class Router(router_pb2_grpc.RouterServicer):
    """Tells of itself what it is given, in turn."""

    def __init__(self, *states: RouterState) -> None:
        self.states = list(states)

    async def GetCluster(self, request, context):
        return GetClusterResponse(nodes=NODES, router=self.states.pop(0))


@pytest.mark.parametrize("state", LATE.values(), ids=LATE)
async def test_a_node_is_back_when_all_processes_use_it(state: RouterState) -> None:
    """Seen failing with its own word for it: then the other decode node ends before the slowest
    process of the router has found this one."""
    router = Router(state, RouterState(in_use=[DECODE, PREFILL]))
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0)
    rpc.add_service(server, router_pb2_grpc.add_RouterServicer_to_server, router)
    await server.start()
    before = ClusterNode(role="decode", address=DECODE, instance_id=9)
    pairs = frozenset({(DECODE, PREFILL)})
    await Fleet((), None, None).until_back([f"127.0.0.1:{port}"], before, pairs, 60.0)
    assert not router.states
    await rpc.stop(server, 0.0)

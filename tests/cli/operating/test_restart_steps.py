"""The order of a rolling restart, the effect on running requests, and reasons against it."""

import pytest

from cli.operating.drains import RestartStep, find_objections, turns
from cli.operating.fleet import of_address, paired
from protos.router_pb2 import ClusterNode, GetClusterResponse, LinkState, RouterState

ROUTER = "127.0.0.1:50050"


def node(role: str, port: int, state: str = "ready", **fields) -> ClusterNode:
    links = [LinkState(peer=f"127.0.0.1:{peer}") for peer in fields.pop("reads", ())]
    address = f"127.0.0.1:{port}"
    return ClusterNode(
        role=role, address=address, state=state, instance_id=port, links=links, **fields
    )


def cluster(*nodes: ClusterNode) -> GetClusterResponse:
    return GetClusterResponse(nodes=nodes)


WHOLE = cluster(
    node("decode", 201), node("prefill", 101), node("decode", 200), node("prefill", 100)
)


def routers(processes: int = 2, state: str = "ready") -> dict[str, RouterState]:
    return {ROUTER: RouterState(state=state, processes=processes, live_requests=1)}


def against(look: GetClusterResponse, known: dict[str, RouterState], *roles: str) -> list[str]:
    every = turns(look, known)
    wanted = [turn for turn in every if not roles or turn.role in roles]
    return list(find_objections(every, wanted, known))


def test_prefill_nodes_are_first_and_the_router_last():
    every = turns(WHOLE, routers())
    ports = [turn.address.rpartition(":")[2] for turn in every]
    assert ports == ["100", "101", "200", "201", "50050"]
    assert every[-1].sentence.endswith("1 request to finish here, 2 processes, one at a time")


def test_two_nodes_of_each_role_can_be_restarted():
    assert against(WHOLE, routers()) == []


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_the_only_node_of_a_role_is_reported(role):
    look = cluster(node("prefill", 100), node("decode", 200))
    (sentence,) = against(look, routers(processes=1), role)
    assert sentence.startswith(f"{role} ") and "is the only one" in sentence


@pytest.mark.parametrize("state", ["starting", "draining", "unhealthy", "unreachable"])
def test_while_a_node_is_not_ready_no_other_is_drained(state):
    look = cluster(*WHOLE.nodes, node("prefill", 102, state))
    assert against(look, routers(), "decode") == [f"prefill 127.0.0.1:102 is {state}"]


def test_while_a_router_is_not_ready_no_node_is_drained():
    assert against(WHOLE, routers(state="not ready")) == [f"router {ROUTER} is not ready"]


def test_the_report_says_whether_a_decode_nodes_requests_fit_elsewhere():
    source = node("decode", 200, queues={"running": 3}, pages={"request": 40, "free": 0})

    def remark(target: ClusterNode | None) -> str:
        nodes = [source] if target is None else [source, target]
        return turns(cluster(*nodes), {})[0].remark

    assert remark(node("decode", 201, pages={"free": 30, "cache": 10})).endswith(
        "continue elsewhere"
    )
    assert "40 pages exceed" in remark(node("decode", 201, pages={"free": 30}))
    assert remark(node("decode", 201, "draining", pages={"free": 99})).endswith("to finish here")
    assert remark(None) == "3 requests to finish here"


def test_a_node_that_does_not_respond_is_not_drained():
    gone = RestartStep("decode", "127.0.0.1:200", "", node("decode", 200, "unreachable"))
    assert not gone.reachable
    look = cluster(node("decode", 200, "unreachable"), node("decode", 201))
    assert of_address(look, "127.0.0.1:200") is None
    assert of_address(look, "127.0.0.1:201") is not None


def test_pairs_consist_of_a_decode_and_a_prefill_node():
    prefill = node("prefill", 100), node("prefill", 101, reads=[100, 200])
    look = cluster(*prefill, node("decode", 200, reads=[100, 201]), node("decode", 201))
    assert paired(look) == {("127.0.0.1:200", "127.0.0.1:100")}


def test_only_nodes_of_the_same_model_can_take_over():
    nodes = [
        node("decode", 200, served_model="a", queues={"on_device": 1}),
        node("decode", 201, served_model="a"),
        node("decode", 210, served_model="b", queues={"on_device": 1}),
    ]
    of_a, _, of_b = turns(cluster(*nodes), {})
    assert of_a.remark == "1 request to continue elsewhere"
    assert of_b.remark == "1 request to finish here"
    (objection,) = against(cluster(*nodes), {})
    assert objection.startswith("decode 127.0.0.1:210 is the only one")

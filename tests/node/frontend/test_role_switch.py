"""A node that changes its role, with the stub engine. Other processes see the end of one node
and the start of another."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.config import (
    DecodeConfig,
    EngineConfig,
    ParallelConfig,
    PrefillConfig,
    ServerConfig,
    SpeculativeConfig,
    TlsConfig,
)
from common.errors import ConfigError, FailedPrecondition
from decode_node import program as decode
from node.roles import other
from prefill_node import program as prefill
from protos import node_pb2, node_pb2_grpc
from tests.node.conftest import StartNode, describe, eventually
from tests.node.frontend.router_end import RouterEnd, busy, submit
from tests.support.processes.programs import runs

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def switch(address: str, role: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        stub.Switch(node_pb2.SwitchRequest(role=role), timeout=60)


def beside(work: Callable[[], None]) -> Callable[[], grpc.RpcError | None]:
    """Run it on a thread. The returned function waits for the end, and returns the failure."""
    failed: list[grpc.RpcError] = []

    def run() -> None:
        try:
            work()
        except grpc.RpcError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def outcome() -> grpc.RpcError | None:
        thread.join(60)
        assert not thread.is_alive()
        return failed[0] if failed else None

    return outcome


def test_a_node_changes_its_role_and_returns_with_the_same_processes(
    start_node: StartNode,
) -> None:
    node = start_node()
    address = node.address()
    first = describe(address)
    with busy(address) as router:
        switched = beside(lambda: switch(address, "prefill"))
        router.wait_for(lambda: router.statuses[-1].state == "draining")
        router.wait_for_end(1)  # without an error
        assert router.tokens == {1: [1, 2] * 50}
        assert switched() is None
        assert router.wait_until_over() is UNAVAILABLE
        assert "becomes a prefill node" in router.call.details()
    eventually(lambda: node.output.count(" listening ") == 2)
    second = describe(address)
    assert (second.role, second.state, second.mode) == ("prefill", "ready", "")
    with RouterEnd(address) as router:
        assert router.wait_until_over() is grpc.StatusCode.UNIMPLEMENTED
    switch(address, "decode")
    eventually(lambda: node.output.count(" listening ") == 3)
    third = describe(address)
    assert (third.role, third.mode) == ("decode", "colocated")
    assert list(first.pids) == list(second.pids) == list(third.pids)
    assert len({first.instance_id, second.instance_id, third.instance_id}) == 3
    with RouterEnd(address) as router:
        router.send(submit(1, [3, 4], 4))
        router.wait_for_end(1)
        assert router.tokens == {1: [3, 4, 3, 4]}
    node.send(signal.SIGTERM)
    assert node.exit_code() == 0
    assert "Traceback" not in node.output


@pytest.mark.parametrize(
    "model, because",
    [("echo", "neither ended nor migrated within 0.3 s"), ("one-role", "there is no room")],
)
def test_a_node_that_cannot_change_its_role_keeps_it(
    start_node: StartNode, model: str, because: str
) -> None:
    node = start_node(model, drain_timeout_s=0.3)
    address = node.address()
    before = describe(address)
    with RouterEnd(address) as router:
        router.wait_for(lambda: router.statuses)
        if model == "echo":
            router.send(submit(1, [1], 1_000_000))
            router.wait_for(lambda: router.tokens)
        with pytest.raises(grpc.RpcError, match=because):
            switch(address, "prefill")
        router.wait_for(lambda: any(each.state == "draining" for each in router.statuses))
        router.wait_for(lambda: router.statuses[-1].state == "ready")
        router.send(submit(2, [7, 8], 4))
        router.wait_for_end(2)
        assert router.tokens[2] == [7, 8, 7, 8]
        assert 1 not in router.ends
    after = describe(address)
    assert (after.role, after.state) == ("decode", "ready")
    assert after.instance_id == before.instance_id
    assert "role change failed" in node.output


def test_a_draining_node_does_not_change_its_role(start_node: StartNode) -> None:
    node = start_node()
    address = node.address()
    engine = describe(address).pids[1]
    with busy(address, 200) as router:
        switched = beside(lambda: switch(address, "prefill"))
        node.line_with("changing role")
        node.send(signal.SIGTERM)
        router.wait_for_end(1)
        assert router.tokens == {1: [1, 2] * 100}
        failed = switched()
        assert failed is not None and failed.code() is UNAVAILABLE
    assert node.exit_code() == 0
    assert not runs(engine)


def test_its_own_or_an_unknown_role_is_rejected(start_node: StartNode) -> None:
    address = start_node().address()
    for role, status in (
        ("decode", grpc.StatusCode.FAILED_PRECONDITION),
        ("king", grpc.StatusCode.INVALID_ARGUMENT),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            switch(address, role)
        assert caught.value.code() is status
        assert describe(address).state == "ready"


def test_common_settings_of_roles_are_kept_and_others_have_their_defaults() -> None:
    engine = EngineConfig(model="m", threads=3)
    begun = prefill.program(PrefillConfig(server=ServerConfig(port=7), engine=engine))
    decode_config = other(begun, "decode").config
    assert decode_config == DecodeConfig(server=ServerConfig(port=7), engine=engine)
    assert other(begun, "prefill") is begun
    asked = DecodeConfig(engine=engine, local_prefill_max_tokens=64)
    assert other(decode.program(asked), "decode").config == asked


def test_a_role_that_the_configuration_forbids_is_rejected_with_the_reason() -> None:
    engine = EngineConfig(model="m")
    colocated = decode.program(DecodeConfig(engine=engine, mode="colocated"))
    with pytest.raises(FailedPrecondition, match="this node is colocated"):
        other(colocated, "prefill")
    parallel = ParallelConfig(dp=2, dp_group=Path("g"))
    grouped = prefill.program(PrefillConfig(engine=EngineConfig(model="m", parallel=parallel)))
    with pytest.raises(FailedPrecondition, match="this node is in a group"):
        other(grouped, "decode")
    drafts = EngineConfig(
        model="m", parallel=ParallelConfig(pp=2), speculative=SpeculativeConfig(method="mtp")
    )
    staged = prefill.program(PrefillConfig(engine=drafts))
    with pytest.raises(ConfigError, match=r"as a decode node: .*mtp .* engine\.parallel\.pp 2"):
        other(staged, "decode")
    tls = TlsConfig(cert=Path("c"), key=Path("k"))
    shown_only = prefill.program(PrefillConfig(server=ServerConfig(port=7, tls=tls), engine=engine))
    with pytest.raises(ConfigError, match="as a decode node: with --tls-cert it needs --tls-ca"):
        other(shown_only, "decode")

"""The lifecycle of a node's two processes: start, health, drain, failure of either."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from protos import node_pb2, node_pb2_grpc, router_pb2
from tests.node.conftest import describe, eventually
from tests.node.frontend.router_end import RouterEnd, busy, submit
from tests.support.network.certificates import Authority
from tests.support.processes.cluster import free_ports
from tests.support.processes.programs import await_end, runs

ABORTED = grpc.StatusCode.ABORTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status


def node_call(address: str, method: str, request: object) -> object:
    with grpc.insecure_channel(address) as channel:
        return getattr(node_pb2_grpc.NodeStub(channel), method)(request, timeout=60)


def test_describe_names_both_processes_and_the_engines_counters(start_node):
    node = start_node()
    eventually(lambda: describe(node.address()).links)  # its first report has come
    described = describe(node.address())
    assert (described.role, described.state, described.mode) == ("decode", "ready", "colocated")
    assert described.pids[0] == node.pid and runs(described.pids[1])
    assert described.instance_id
    assert (dict(described.pages), described.steps) == ({"free": 8}, 7)
    assert [(link.peer, link.path) for link in described.links] == [("127.0.0.1:1", "tcp")]
    assert describe(start_node().address()).instance_id != described.instance_id


def test_describe_lists_the_ranks_of_a_node_with_several(start_node):
    alone = start_node().address()
    eventually(lambda: describe(alone).links)  # its first report has come
    assert not (described := describe(alone)).ranks and not described.links[0].members
    address = start_node("ranks").address()
    eventually(lambda: describe(address).links)
    described = describe(address)
    assert list(described.pids[2:]) == [21, 22]
    ranks = [
        (rank.rank, rank.pid, rank.device, rank.memory_bytes, rank.steps_behind)
        for rank in described.ranks
    ]
    engine = described.pids[1]
    assert ranks == [(0, engine, "cuda:2", 5, 0), (1, 21, "cuda:3", 7, 2), (2, 22, "cuda:0", 0, 0)]
    members = [
        (member.rank, member.producer_rank, member.path, member.gib_per_s)
        for member in described.links[0].members
    ]
    assert members == [(0, 0, "tcp", 2.0), (1, 0, "cma", 1.5)]


def test_tokens_computed_by_a_killed_engine_are_sent_before_the_end(start_node):
    address = start_node().address()
    with RouterEnd(address) as router, RouterEnd(address) as other:
        router.send(submit(1, [1], 100_000, stream_interval=1000))
        router.wait_for(lambda: router.tokens)
        other.send(submit(1, [1], 100_000))
        other.wait_for(lambda: len(other.tokens.get(1, ())) > 50)
        assert router.groups == {1: [1]}
        os.kill(describe(address).pids[1], signal.SIGKILL)
        router.wait_until_over()
        assert router.last_words is not None
        assert len(router.tokens[1]) > 50


def test_a_killed_engine_fails_every_stream_and_the_node_at_once(start_node):
    node = start_node()
    address = node.address()
    with busy(address, 100_000) as router:
        os.kill(describe(address).pids[1], signal.SIGKILL)
        assert router.wait_until_over() is ABORTED
        assert "killed by SIGKILL" in router.call.details()
        assert router.last_words == (ABORTED.value[0], router.call.details())
    assert node.exit_code() == 1
    assert "the engine was killed by SIGKILL" in node.line_with(" ERROR ")


# Seen failing if the server process waits for an engine that does not end.
@pytest.mark.parametrize("model", ["crash", "stuck-after-crash"])
def test_an_engine_exception_is_the_last_message_of_the_node(start_node, model):
    node = start_node(model)
    engine = describe(node.address()).pids[1]
    with RouterEnd(node.address()) as router:
        router.send(submit(1, [1]))
        assert router.wait_until_over() is ABORTED
        assert "the stub was told to crash" in router.call.details()
    assert node.exit_code() == 1
    assert not runs(engine)
    assert "Traceback" in node.output


def test_a_frontend_with_a_thread_that_does_not_end_logs_it_and_exits(start_node):
    # Seen failing without the timer, by the deadline of the test.
    node = start_node("crash", module="tests.node.frontend.held_node")
    engine = describe(node.address()).pids[1]
    with RouterEnd(node.address()) as router:
        router.send(submit(1, [1]))
        router.wait_until_over()
    assert node.exit_code() == 1
    assert "Timeout (0:00:01)!\nThread 0x" in node.output
    await_end(engine)


@pytest.mark.parametrize("model", ["echo", pytest.param("hang", marks=pytest.mark.long)])
def test_a_killed_frontend_ends_its_engine(start_node, model):
    node = start_node(model, ready=False)
    engine = describe(node.address()).pids[1]
    node.send(signal.SIGKILL)
    await_end(engine)


def test_a_killed_frontend_ends_a_stopped_engine(start_node):
    # Seen failing without the prctl call in leash.py.
    node = start_node()
    engine = describe(node.address()).pids[1]
    os.kill(engine, signal.SIGSTOP)
    node.send(signal.SIGKILL)
    await_end(engine)


# A frontend with an engine for each of these environments. Engines never finish their imports.
FRONT = """
import asyncio, json, os, sys
from node.frontend.frontend import EngineProcess
async def main():
    for variables in json.loads(sys.argv[1]):
        os.environ.update(variables)
        print(EngineProcess('tests.node.frontend.slow_import').pid, flush=True)
        for name in variables:
            del os.environ[name]
    await asyncio.sleep(600)
asyncio.run(main())
"""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
OF_USERS = ({}, {"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "7"})


def test_engines_have_short_idle_spins_and_end_with_their_frontend_during_imports():
    """Seen failing with the frontend's environment unchanged, with the user's setting
    overwritten, and with the call of prctl after the engine's imports."""
    bare = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, "-c", FRONT, json.dumps(OF_USERS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=bare, text=True) as front:
        assert front.stdout is not None
        try:
            said = [front.stdout.readline() for _ in range(2 * len(OF_USERS))]
            assert said.count("importing\n") == len(OF_USERS)
            engines = [int(line) for line in said if line != "importing\n"]
            variables = [Path(f"/proc/{each}/environ").read_text().split("\0") for each in engines]
        finally:
            front.kill()
        for each in engines:
            await_end(each)
    of_waiting = [[one for one in each if one.startswith(WAITING)] for each in variables]
    given = [[f"{name}={value}" for name, value in each.items()] for each in OF_USERS]
    assert of_waiting == [["GOMP_SPINCOUNT=20000"], *given[1:]]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_to_the_whole_process_group_drains_the_node(start_node, number):
    # Seen failing if the engine does not ignore these signals.
    node = start_node()
    address = node.address()
    engine = describe(address).pids[1]
    with busy(address) as router:
        node.send_to_group(number)
        router.wait_for(lambda: router.statuses[-1].state == "draining")
        router.send(submit(2, [1], 4))
        router.wait_for_end(2)
        assert router.ends[2][2] == UNAVAILABLE.value[0]
        eventually(lambda: health(address) == NOT_SERVING)
        router.wait_for_end(1)
        assert router.tokens == {1: [1, 2] * 50}
        assert router.wait_until_over() is UNAVAILABLE
    assert node.exit_code() == 0
    assert not runs(engine)
    assert "Traceback" not in node.output


def test_a_drain_call_drains_the_node(start_node):
    node = start_node()
    node_call(node.address(), "Drain", node_pb2.DrainRequest())
    assert node.exit_code() == 0


def test_a_signal_after_a_drain_call_does_not_interrupt_the_drain(start_node):
    # As in Kubernetes: preStop calls Drain, then SIGTERM arrives.
    node = start_node()
    address = node.address()
    with busy(address) as router:
        node_call(address, "Drain", node_pb2.DrainRequest())
        node.line_with("draining")
        node.send(signal.SIGTERM)
        router.wait_for_end(1)
        assert router.tokens == {1: [1, 2] * 50}
    assert node.exit_code() == 0
    assert "reason=drained" in node.output


def test_a_second_signal_ends_the_node_at_once(start_node):
    node = start_node()
    with busy(node.address(), 1_000_000) as router:
        node.send(signal.SIGINT)
        node.line_with("draining")
        node.send(signal.SIGINT)
        assert router.wait_until_over() is UNAVAILABLE
    assert node.exit_code() == 0
    assert "second signal" in node.output


def test_a_drain_ends_at_its_time_limit(start_node):
    node = start_node(drain_timeout_s=0.3)
    with busy(node.address(), 1_000_000) as router:
        node.send(signal.SIGTERM)
        assert router.wait_until_over() is UNAVAILABLE
        assert "still running after 0.3 s" in router.call.details()
    assert node.exit_code() == 0


@pytest.mark.parametrize("model", [pytest.param("hang", marks=pytest.mark.long), "loading"])
def test_a_signal_during_the_start_ends_the_node_at_once(start_node, model):
    # Seen failing if signals are not blocked around the engine's start.
    node = start_node(model, ready=False)
    engine = describe(node.address()).pids[1]
    node.send_to_group(signal.SIGINT)
    assert node.exit_code() == 0
    assert not runs(engine)


def test_an_engine_that_does_not_end_after_a_drain_is_killed_and_logged(start_node):
    node = start_node("stuck-at-end")
    engine = describe(node.address()).pids[1]
    node.send(signal.SIGTERM)
    assert node.exit_code() == 1
    assert not runs(engine)
    assert "did not exit cleanly" in node.output


def test_a_starting_node_is_described_but_serves_no_request(start_node):
    node = start_node("hang", ready=False)
    address = node.address()
    described = describe(address)
    assert (described.state, described.model) == ("starting", "hang")
    assert health(address) == NOT_SERVING
    with RouterEnd(address) as router:
        assert router.wait_until_over() is UNAVAILABLE
        assert router.call.details() == "the node is starting"
    with pytest.raises(grpc.RpcError) as caught:
        node_call(address, "FlushCache", router_pb2.FlushCacheRequest())
    assert caught.value.code() is UNAVAILABLE


def test_a_stopped_engine_is_unhealthy_until_it_continues(start_node):
    node = start_node()
    address = node.address()
    eventually(lambda: health(address) == SERVING)
    assert health(address, "baton.v1.DecodeNode") == SERVING
    engine = describe(address).pids[1]
    with RouterEnd(address) as router:
        router.wait_for(lambda: router.num_beats > 2)
        os.kill(engine, signal.SIGSTOP)
        eventually(lambda: health(address) == NOT_SERVING)
        beats = router.num_beats
        with RouterEnd(address) as late:
            late.wait_for(lambda: late.statuses)
            described = describe(address)  # by the frontend, without the engine
            assert (described.state, described.tokenizer_hash) == ("unhealthy", "1")
            assert not described.queues
            assert (router.num_beats, late.num_beats) == (beats, 0)
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: health(address) == SERVING)
        router.wait_for(lambda: router.num_beats > beats)
    assert dict(describe(address).queues) == {"running": 0}


def test_a_health_port_without_tls_serves_only_health(start_node, tmp_path):
    (port,) = free_ports(1)
    config = Authority().write(tmp_path)
    address = start_node(tls=config, health_port=port).address()
    eventually(lambda: health(f"127.0.0.1:{port}", "baton.v1.Node") == SERVING)
    for closed in (address, f"127.0.0.1:{port}"):
        with pytest.raises(grpc.RpcError):
            describe(closed)
    with pytest.raises(grpc.RpcError):
        health(address)


def test_a_stopped_engine_does_not_delay_the_end_of_the_node(start_node):
    node = start_node(drain_timeout_s=0.2)
    engine = describe(node.address()).pids[1]
    os.kill(engine, signal.SIGSTOP)
    node.send(signal.SIGTERM)
    assert node.exit_code() == 0
    assert not runs(engine)


def test_a_configuration_error_found_by_the_engine_is_one_line_and_exit_code_2(start_node):
    node = start_node("bad-config", ready=False)
    assert node.exit_code() == 2
    assert "baton serve decode: engine.model: no such checkpoint\n" in node.output
    assert "Traceback" not in node.output


def test_a_second_node_on_a_port_gives_one_line_and_exit_code_2(start_node):
    # Seen failing with grpc.so_reuseport at its default: the second node served as well.
    flags = ("port", "metrics_port", "health_port")
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    first = start_node(**ports)
    for flag, port in ports.items():
        second = start_node(**{flag: port}, ready=False)
        assert second.exit_code() == 2
        assert second.output.count("\n") == 1
        assert f"127.0.0.1:{port}" in second.output
    assert describe(first.address()).state == "ready"


def test_flush_and_abort_reach_the_engine(start_node):
    address = start_node().address()
    flush = router_pb2.FlushCacheRequest()
    assert node_call(address, "FlushCache", flush).pages_freed == 5
    with RouterEnd(address) as router:
        router.send(submit(1, [1], 100_000, request_id="doomed"), submit(2, [1], 100_000))
        router.wait_for(lambda: len(router.tokens) == 2)
        with pytest.raises(grpc.RpcError) as caught:
            node_call(address, "FlushCache", flush)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "1 request is running"
        abort = node_pb2.AbortRequest
        assert node_call(address, "Abort", abort(request_id="nobody")).aborted == 0
        assert node_call(address, "Abort", abort(request_id="doomed")).aborted == 1
        router.wait_for_end(1)
        assert 2 not in router.ends
        with pytest.raises(grpc.RpcError) as caught:
            node_call(address, "Abort", abort())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_reflection_lists_and_describes_every_service_under_both_of_its_names(start_node):
    address = start_node().address()
    ask = reflection_pb2.ServerReflectionRequest
    versions = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
    with grpc.insecure_channel(address) as channel:
        for version in versions:
            call = channel.stream_stream(
                f"/{version}/ServerReflectionInfo",
                request_serializer=ask.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = [ask(list_services=""), *(ask(file_containing_symbol=v) for v in versions)]
            listed, *described = call(iter(asked), timeout=60)
            names = {service.name for service in listed.list_services_response.service}
            assert {"baton.v1.Node", "baton.v1.DecodeNode", "grpc.health.v1.Health"} <= names
            assert versions <= names
            assert all(each.HasField("file_descriptor_response") for each in described)


def test_metrics_are_served_over_http(start_node):
    (port,) = free_ports(1)
    node = start_node(metrics_port=port)
    with RouterEnd(node.address()) as router:
        router.send(submit(1, [1], 100_000), submit(2, []))
        router.wait_for_end(2)

        def scraped() -> str:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()

        eventually(lambda: 'baton_queue_requests{queue="on_device"} 1.0\n' in scraped())
        text = scraped()
    assert 'baton_node_requests_rejected_total{reason="invalid"} 1.0\n' in text
    assert 'baton_streams{kind="router"} 1.0\n' in text
    assert 'baton_kv_pages{holder="free"} 8.0\n' in text
    assert "baton_swap_pages 3.0\n" in text
    assert "baton_retractions_total 2.0\n" in text
    assert "baton_handoffs_opened_total 5.0\n" in text
    assert 'baton_handoffs_total{outcome="completed"} 4.0\n' in text
    assert 'baton_link_min_bytes_per_second{path="tcp"} 2.147483648e+09\n' in text

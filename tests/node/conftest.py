"""A node's frontend with the stub engine, as a real process."""

import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from common.config import DecodeConfig, EngineConfig, ServerConfig
from protos import node_pb2, node_pb2_grpc
from tests.support.processes.programs import Program

StartNode = Callable[..., Program]
STUB = "tests.support.processes.stub_node"


def stub_config(model: str = "echo", port: int = 0, **front: object) -> DecodeConfig:
    return DecodeConfig(server=ServerConfig(port=port, **front), engine=EngineConfig(model=model))


@pytest.fixture
def start_node() -> Iterator[StartNode]:
    """Return a function that starts nodes. `model` selects the stub engine's behaviour, `module`
    its program."""
    programs: list[Program] = []

    def start(
        model: str = "echo", *, ready: bool = True, module: str = STUB, **front: object
    ) -> Program:
        config = stub_config(model, **front).model_dump_json()
        program = Program(module, config)
        programs.append(program)
        if ready:
            program.line_with(" ready ")
        return program

    yield start
    for program in programs:
        program.close()


def describe(address: str) -> node_pb2.DescribeResponse:
    with grpc.insecure_channel(address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        return stub.Describe(node_pb2.DescribeRequest(), timeout=60)


def eventually(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll a process from outside until `what` is true."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)

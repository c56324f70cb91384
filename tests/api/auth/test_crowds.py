"""One address with thousands of streams or idle connections, and a client of another address."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.api.rig import COMPLETIONS, WAIT_S, Api, api_for, eventually
from tests.support.network.http_client import Response, Wire, request

NUM_STREAMS = 2000
NUM_IDLE = 5000
ASK = request("POST", COMPLETIONS, b'{"prompt":"x","stream":true,"max_tokens":4}')


@pytest.fixture(autouse=True)
def descriptors() -> None:
    """Allow enough descriptors: both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * NUM_IDLE + 1000
    if hard < wanted:
        pytest.skip(f"needs {wanted} open files, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


@asynccontextmanager
async def crowd(port: int, number: int, first: bytes = b"") -> AsyncIterator[list[Wire]]:
    """Open connections from one address that send this and nothing more."""
    wires: list[Wire] = []
    try:
        for _ in range(number):
            wires.append(Wire(*await asyncio.open_connection("127.0.0.1", port)))
            await wires[-1].send(first)
        yield wires
    finally:
        for wire in wires:
            wire.writer.transport.abort()


async def another_client_asks(api: Api) -> tuple[Response, float]:
    """Send a request from another address. Return the response and its duration."""
    began = time.monotonic()
    port = api.router.http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    try:
        wire = Wire(reader, writer)
        await wire.send(ASK)
        await api.node.complete()
        return await wire.response(), time.monotonic() - began
    finally:
        writer.close()


async def test_2000_streams_of_one_address_leave_room_for_another(model):
    async with api_for(model) as api, crowd(api.router.http_port, NUM_STREAMS, ASK):
        admission = api.router.admission
        for _ in range(896):
            await api.node.submitted()
        answer, took_s = await another_client_asks(api)
        assert answer.status == 200
        assert took_s < WAIT_S
        assert admission.num_live <= 896
        print(f"answered after {took_s * 1e3:.0f} ms beside {admission.num_live} live streams")


async def test_5000_idle_connections_of_one_address_leave_room_for_another(model):
    async with api_for(model) as api, crowd(api.router.http_port, NUM_IDLE):
        value = api.router.metrics.registry.get_sample_value
        await eventually(lambda: (value("baton_http_connections") or 0) <= 2048 * 7 // 8)
        answer, took_s = await another_client_asks(api)
        assert answer.status == 200
        assert took_s < WAIT_S
        print(f"answered after {took_s * 1e3:.0f} ms")

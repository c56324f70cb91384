"""Every TCP connection of a router sends at once what it is given: clients', and to its nodes."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from protos.decode_pb2 import FINISH_REASON_STOP
from tests.api.rig import collect, router_for
from tests.support.http_client import connected, get
from tests.support.stub_decode_node import StubDecodeNode


def tcp_connections() -> Iterator[socket.socket]:
    """Every one of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since
            continue
        with one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    one.getpeername()
                except OSError:  # it listens, or is over
                    continue
                yield one


async def test_every_tcp_connection_of_a_router_has_nodelay(model: Path) -> None:
    async with (
        StubDecodeNode() as node,
        router_for(model, decode=[node.address]) as (
            client,
            router,
        ),
    ):
        await client.wait_until_serving()
        call = client.generate("x")
        submit = await node.submitted()
        node.say({submit.number: [66]}, ended={submit.number: FINISH_REASON_STOP})
        await collect(call)
        assert (await get(router.http_port, "/health")).status == 200
        async with connected(router.http_port) as wire:
            await wire.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await wire.response()
            ours = {"http": router.http_port, "grpc": router.port}
            node_port = int(node.address.rpartition(":")[2])
            seen = set()
            for connection in tcp_connections():
                local, remote = connection.getsockname()[1], connection.getpeername()[1]
                ends = {name for name, port in ours.items() if port == local}
                ends |= {"node"} if remote == node_port else set()
                for end in ends:
                    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), end
                seen |= ends
    assert seen == {"http", "grpc", "node"}

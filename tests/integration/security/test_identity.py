"""A cluster with a secret, as real processes: who is accepted, what both sides log, and how
secrets are replaced. All tests share one cluster. A process that a test starts beside it does
not belong to it."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from common.identity.program import identity_of
from common.identity.secret import VARIABLE, new_secret
from common.rpc import make_channel
from protos.decode_pb2 import Peers, ToNode
from protos.kvtransfer_pb2_grpc import KvTransferStub
from protos.node_pb2 import AbortRequest, DrainRequest, WatchCacheRequest
from protos.node_pb2_grpc import NodeStub
from protos.router_pb2 import FlushCacheRequest
from tests.support.network.grpc_calls import end_of_stream
from tests.support.network.scrapes import scraped, value
from tests.support.processes import fork_server
from tests.support.processes.cluster import Cluster, Node, free_ports, wait_until
from tests.support.processes.programs import ROOT, Program

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = [1, 2, 3, 4, 5] * 20


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return next(free_ports(1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    model: Path, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    logs = tmp_path_factory.mktemp("logs")
    flags = (f"--metrics-port={metrics_port}",)
    async with Cluster(model, logs, path="tcp", decode_flags=flags) as cluster:
        yield cluster


@pytest.fixture
def start(model: Path, program: type[Program]) -> Callable[..., Program]:
    """Return a function that starts processes of this model, and ends them with the test."""
    return lambda module, *flags: program(module, f"--model={model}", *flags)


def _log(node: Node) -> str:
    assert node.child.log is not None
    return node.child.log.read_text()


async def _answers(cluster: Cluster) -> None:
    assert len((await cluster.generate(PROMPT, max_tokens=4)).token_ids) == 4


async def test_unauthenticated_callers_get_no_data_and_end_no_process(
    cluster: Cluster, metrics_port: int
) -> None:
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    for node in (prefill, decode):
        async with make_channel(node.address) as channel:
            stub = NodeStub(channel)  # type: ignore[no-untyped-call]
            for call in (
                stub.Drain(DrainRequest(), timeout=60),
                stub.FlushCache(FlushCacheRequest(), timeout=60),
                stub.Abort(AbortRequest(request_id="x"), timeout=60),
                stub.WatchCache(WatchCacheRequest(), timeout=60).read(),
                *([KvTransferStub(channel).Pair(timeout=60).read()] if node is prefill else []),  # type: ignore[no-untyped-call]
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    # No caller can make a decode node connect to an address of its choice.
    peers = ToNode(peers=Peers(prefill_addresses=["127.0.0.1:9"])).SerializeToString()
    serve = "/baton.v1.DecodeNode/Serve"
    code, _ = await asyncio.to_thread(end_of_stream, decode.address, serve, peers)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "127.0.0.1:9 " not in _log(decode)
    assert "call rejected" in _log(decode) and "has no cluster secret" in _log(decode)
    scrape = await asyncio.to_thread(scraped, metrics_port)
    counted = value(scrape, "baton_peer_auth_rejected_total", side="caller", reason="missing")
    assert counted >= 5
    await _answers(cluster)


async def test_a_router_with_a_wrong_or_no_secret_logs_the_reason_and_so_does_the_node(
    cluster: Cluster, start: Callable[..., Program], tmp_path: Path
) -> None:
    other = tmp_path / "secret"
    other.write_text(new_secret())
    ports = ("--port=0", "--http-port=0")
    decode = f"--decode={cluster.decode[0].address}"
    for flags, sentence in (((f"--secret-file={other}",), "another secret"), ((), "no token")):
        router = start("router", *ports, decode, *flags)
        line = await asyncio.to_thread(router.line_with, "node does not respond")
        assert sentence in line
        await wait_until(
            lambda sentence=sentence: sentence in _log(cluster.decode[0]),
            f"the node says {sentence!r}",
        )
    await _answers(cluster)


async def test_an_impostor_on_a_nodes_address_gets_no_request(
    cluster: Cluster, start: Callable[..., Program]
) -> None:
    """The impostor is a decode node without the secret. The router of this test has its address."""
    impostor = start("decode_node", "--port=0", "--mode=colocated", "--device=cpu")
    await asyncio.to_thread(impostor.line_with, " ready ")
    router = start(
        "router",
        "--port=0",
        "--http-port=0",
        f"--decode={impostor.address()}",
        f"--secret-file={cluster.secret_file}",
    )
    line = await asyncio.to_thread(router.line_with, "node does not respond")
    assert "did not prove that it is a node of this cluster" in line


@pytest.mark.long  # of one server: tests/common/identity/test_calls.py
async def test_a_secret_is_replaced_under_load_and_the_old_one_is_rejected(
    cluster: Cluster,
) -> None:
    old, new = cluster.secret_file.read_text().strip(), new_secret()
    stolen = cluster.secret_file.with_name("stolen")
    stolen.write_text(old)
    thief = identity_of("operator", "a thief", stolen)
    for content in (f"{old}\n{new}\n", f"{new}\n{old}\n"):
        cluster.secret_file.write_text(content)
        await _answers(cluster)
        async with make_channel(cluster.decode[0].address, None, thief) as channel:
            await NodeStub(channel).FlushCache(FlushCacheRequest(), timeout=60)  # type: ignore[no-untyped-call]
    cluster.secret_file.write_text(new)
    async with make_channel(cluster.decode[0].address, None, thief) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="another secret"):
            await NodeStub(channel).FlushCache(FlushCacheRequest(), timeout=60)  # type: ignore[no-untyped-call]
    # A restarted node joins with the new one.
    await cluster.replace_prefill()
    await _answers(cluster)


# Start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["router", "prefill_node", "decode_node"])
async def test_no_process_listens_beyond_this_host_without_a_flag(
    start: Callable[..., Program], role: str
) -> None:
    flags = ("--decode=127.0.0.1:1",) if role == "router" else ()
    refused = start(role, "--host=0.0.0.0", "--port=0", *flags)
    assert await asyncio.to_thread(refused.exit_code) == 2
    (line,) = refused.output.splitlines()
    assert "--host 0.0.0.0 is reachable from other hosts" in line and "--insecure" in line


async def test_a_short_secret_ends_a_process_with_one_line_that_does_not_contain_it(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2")
    refused = start("prefill_node", "--port=0", f"--secret-file={file}")
    assert await asyncio.to_thread(refused.exit_code) == 2
    (line,) = refused.output.splitlines()
    assert "has 7 characters" in line and "hunter2" not in line


# Commands -----------------------------------------------------------------------------------------


def _secret(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    return fork_server.run("cli.cluster_secret", *arguments, environment=environment | variables)


async def test_a_printed_token_is_valid_for_one_call(cluster: Cluster) -> None:
    file = f"--secret-file={cluster.secret_file}"
    key = _secret("--operator", file).stdout.strip()
    assert key.startswith("baton-operator-")
    # An operator can compute the same from the key alone.
    for printed in (
        _secret("--token=FlushCache", file),
        _secret("--token=FlushCache", **{VARIABLE: key}),
    ):
        shown = ("authorization", f"Bearer {printed.stdout.strip()}")
        async with make_channel(cluster.decode[0].address) as channel:
            stub = NodeStub(channel)  # type: ignore[no-untyped-call]
            await stub.FlushCache(FlushCacheRequest(), timeout=60, metadata=[shown])
            with pytest.raises(grpc.aio.AioRpcError, match="used before"):
                await stub.FlushCache(FlushCacheRequest(), timeout=60, metadata=[shown])


async def test_baton_secret_prints_a_new_secret_or_an_error() -> None:
    first, second = _secret(), _secret()
    assert first.returncode == 0 and len(first.stdout.strip()) >= 43
    assert first.stdout != second.stdout
    none = _secret("--operator", f"--secret-file={ROOT}/no-such-file")
    assert (none.returncode, none.stdout) == (2, "")
    assert len(none.stderr.splitlines()) == 1 and "no-such-file" in none.stderr

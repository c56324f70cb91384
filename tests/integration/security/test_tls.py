"""TLS between real processes: complete requests, rejected peers, and replaced certificates."""

import asyncio
import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import grpc.aio
import openai
import pytest
import pytest_asyncio

from cli import client
from common import tls
from common.config import TlsConfig
from common.rpc import make_channel
from protos.node_pb2 import DescribeRequest
from protos.node_pb2_grpc import NodeStub
from tests.support.network.certificates import Authority, flags
from tests.support.processes.cluster import Cluster, free_ports
from tests.support.processes.local_system import Up
from tests.support.processes.programs import Program

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = [1, 2, 3, 4, 5] * 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return Authority().write(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    model: Path, config: TlsConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    logs = tmp_path_factory.mktemp("logs")
    flags = ("--served-model-name=noise",)
    async with Cluster(
        model, logs, path="tcp", router_flags=flags, tls_config=config, with_secret=False
    ) as cluster:
        yield cluster


def _openai(cluster: Cluster, config: TlsConfig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"https://127.0.0.1:{cluster.http_port}/v1",
        api_key="x",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(
            verify=ssl.create_default_context(cafile=str(config.ca))
        ),
    )


async def _refusal(address: str, config: TlsConfig | None) -> str:
    """Return why a node rejects a caller of Describe, or "" if it does not."""
    certificates = None if config is None else tls.certificates(config, "the test's")
    async with make_channel(address, certificates) as channel:
        try:
            await NodeStub(channel).Describe(DescribeRequest(), timeout=60)  # type: ignore[no-untyped-call]
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return ""


async def test_a_request_over_grpc_and_https_and_with_a_hand_off(
    cluster: Cluster, config: TlsConfig
) -> None:
    over_grpc = await cluster.generate(PROMPT, max_tokens=8)
    assert len(over_grpc.token_ids) == 8
    async with _openai(cluster, config) as https:
        answer = await https.completions.create(
            model="noise", prompt=PROMPT, max_tokens=8, temperature=0
        )
        assert answer.choices[0].text == over_grpc.text
        streamed = await https.completions.create(
            model="noise", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
        )
        assert "".join([c.choices[0].text async for c in streamed]) == over_grpc.text
    (link,) = (await cluster.decode[0].describe()).links
    assert link.peer == cluster.prefill[0].address
    assert "encrypted=True" in cluster.prefill[0].child.log.read_text()


async def test_nodes_accept_only_peers_signed_by_their_authority(
    cluster: Cluster, config: TlsConfig, tmp_path: Path
) -> None:
    stranger = Authority().write(tmp_path)
    for node in cluster.nodes:
        assert await _refusal(node.address, config) == ""
        assert await _refusal(node.address, None)
        assert await _refusal(node.address, TlsConfig(ca=config.ca))
        assert await _refusal(node.address, stranger.model_copy(update={"ca": config.ca}))
        assert "CERTIFICATE_VERIFY_FAILED" in await _refusal(node.address, stranger)
    # The rejected calls had no effect on them.
    assert len((await cluster.generate(PROMPT, max_tokens=2)).token_ids) == 2


async def test_clients_of_the_router_verify_it_and_need_no_certificate(
    cluster: Cluster, config: TlsConfig, program: type[Program]
) -> None:
    arguments = ("cli.generate", "hello", f"--router={cluster.address}", "--max-tokens=2")
    trusting = program(*arguments, f"--tls-ca={config.ca}", "--stats")
    plain = program(*arguments)
    assert await asyncio.to_thread(trusting.exit_code) == 0
    assert "2 generated" in trusting.output
    assert await asyncio.to_thread(plain.exit_code) == 1
    assert "set --tls-ca if it uses TLS" in plain.output
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.to_thread(
            urllib.request.urlopen, f"https://127.0.0.1:{cluster.http_port}/health"
        )


@pytest.mark.long  # of one server and channel: tests/node/test_tls.py
async def test_certificates_and_authority_are_replaced_without_a_restart(
    cluster: Cluster, config: TlsConfig
) -> None:
    """All processes get certificates of another authority. Existing connections continue, and
    new connections to a node succeed from processes that started with the old certificates."""
    assert config.cert is not None
    Authority().write(config.cert.parent)
    await cluster.replace_prefill()
    await client.until_serving(
        cluster.address, "baton.v1.Router", tls.certificates(config, "the test's")
    )
    assert len((await cluster.generate([7, *PROMPT], max_tokens=2)).token_ids) == 2
    async with _openai(cluster, config) as https:
        assert (await https.models.list()).data


async def test_a_router_reports_why_it_cannot_use_a_node_of_another_authority(
    cluster: Cluster, config: TlsConfig, model: Path, program: type[Program], tmp_path: Path
) -> None:
    stranger = Authority().write(tmp_path)
    router = program(
        "router",
        f"--model={model}",
        "--port=0",
        "--http-port=0",
        *(f"--decode={node.address}" for node in cluster.decode),
        *flags("node-tls", stranger),
    )
    line = await asyncio.to_thread(router.line_with, "node does not respond")
    assert "CERTIFICATE_VERIFY_FAILED" in line
    router.send(signal.SIGTERM)
    assert await asyncio.to_thread(router.exit_code) == 0


# Start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "role, spoil, sentence",
    [
        ("router", {"key": Path("/nowhere")}, "/nowhere: No such file"),
        ("prefill_node", {"ca": Path("/nowhere")}, "/nowhere: No such file"),
        ("decode_node", {"key": None}, "cert and key must be set together"),
    ],
)
async def test_an_incomplete_tls_configuration_is_rejected_in_one_line(
    config: TlsConfig,
    model: Path,
    program: type[Program],
    role: str,
    spoil: dict[str, Path | None],
    sentence: str,
) -> None:
    decode = ("--decode=127.0.0.1:1",) if role == "router" else ()
    (port,) = free_ports(1)
    tried = program(
        role,
        f"--model={model}",
        f"--port={port}",
        *decode,
        *flags("server.tls", config.model_copy(update=spoil)),
    )
    assert await asyncio.to_thread(tried.exit_code) == 2
    (line,) = tried.output.splitlines()
    assert "--server.tls: " in line and sentence in line


@pytest.mark.long
async def test_up_uses_tls_everywhere(model: Path, config: TlsConfig, tmp_path: Path) -> None:
    files = config.model_dump(exclude_none=True).items()
    tls_files = (f"--tls-{name}={path}" for name, path in files)
    with closing(Up(tmp_path, f"--model={model}", *tls_files)) as up:
        line = await asyncio.to_thread(up.line_with, f"curl --cacert {config.ca} https://")
        assert f"https://127.0.0.1:{up.http_port}/" in line
        context = ssl.create_default_context(cafile=str(config.ca))
        models = f"https://127.0.0.1:{up.http_port}/v1/models"
        with await asyncio.to_thread(urllib.request.urlopen, models, context=context) as answer:
            assert json.load(answer)["data"]
        assert await _refusal(up.decode, None)
        up.send(signal.SIGINT)
        assert await asyncio.to_thread(up.exit_code) == 0

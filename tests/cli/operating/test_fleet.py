"""Return of a restarted process, as every worker process of every router sees it, and reasons of
its rejections."""

import asyncio
import ssl

import pytest

from cli.client import UnfinishedRestart
from cli.operating.__main__ import OPERATIONS, parser
from cli.operating.command import Result, with_fleet
from cli.operating.fleet import Fleet
from common import tls
from common.config import TlsConfig
from common.errors import Unauthenticated
from common.identity.secret import new_secret
from protos import router_pb2_grpc
from protos.router_pb2 import ClusterNode, GetClusterResponse, LinkState, RouterState
from tests.support.network.certificates import Authority
from tests.support.network.grpc_calls import serving
from tests.support.processes.stub_decode_node import StubNode

PREFILL, DECODE = "127.0.0.1:100", "127.0.0.1:200"
NODES = (
    ClusterNode(role="prefill", address=PREFILL, state="ready", instance_id=1),
    ClusterNode(
        role="decode", address=DECODE, state="ready", instance_id=2, links=[LinkState(peer=PREFILL)]
    ),
)
LATE = {
    "in use by no process": RouterState(),
    "in use by others": RouterState(in_use=[PREFILL]),
    "a process is silent": RouterState(in_use=[PREFILL, DECODE], silent_processes=1),
}


class Router(router_pb2_grpc.RouterServicer):
    """Returns the given cluster states, one after the other."""

    def __init__(self, *states: RouterState) -> None:
        self.states = list(states)

    async def GetCluster(self, request, context):
        return GetClusterResponse(nodes=NODES, router=self.states.pop(0))


@pytest.mark.parametrize("state", LATE.values(), ids=LATE)
async def test_a_node_has_returned_when_all_processes_use_it(state):
    """Seen failing if the node's own report suffices: the other decode node then ends before the
    slowest process of the router has found this one."""
    router = Router(state, RouterState(in_use=[DECODE, PREFILL]))
    before = ClusterNode(role="decode", address=DECODE, instance_id=9)
    pairs = frozenset({(DECODE, PREFILL)})
    async with serving((router_pb2_grpc.add_RouterServicer_to_server, router)) as address:
        await Fleet((), None, None).until_back([address], before, pairs, 60.0)
    assert not router.states


async def _pause(*arguments: str) -> Result:
    options = parser("nodes pause").parse_args(arguments)
    return await with_fleet(options, OPERATIONS["nodes pause"].work)


class Guarded(router_pb2_grpc.RouterServicer):
    """Rejects every caller."""

    async def Pause(self, request, context):
        raise Unauthenticated("this API key is unknown to this router")


@pytest.mark.parametrize(
    "files, variables, arguments, source",
    [
        (["var/secret"], {}, [], "the secret came from var/secret (`baton up` wrote it here)"),
        (["var/secret", "s"], {}, ["--secret-file=s"], "the secret came from s (--secret-file)"),
        (
            ["var/secret"],
            {"BATON_SECRET": new_secret()},
            [],
            "the secret came from the variable BATON_SECRET",
        ),
        ([], {}, [], "no API key was sent: set --api-key-file or the variable BATON_API_KEY"),
        (["k"], {}, ["--api-key-file=k"], "the API key came from k (--api-key-file)"),
        (
            ["var/secret"],
            {"BATON_API_KEY": "key"},
            [],
            "the API key came from the variable BATON_API_KEY",
        ),
    ],
)
async def test_a_rejected_command_reports_the_source_of_its_credentials(
    files, variables, arguments, source, tmp_path, monkeypatch
):
    """The secret of another cluster is in var/secret, or in the environment of this shell."""
    monkeypatch.chdir(tmp_path)
    for name in ("BATON_SECRET", "BATON_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(new_secret())
    async with serving((router_pb2_grpc.add_RouterServicer_to_server, Guarded())) as address:
        with pytest.raises(UnfinishedRestart) as undone:
            await _pause(f"--router={address}", *arguments)
    assert str(undone.value).endswith(
        f"UNAUTHENTICATED: this API key is unknown to this router ({source})"
    )


async def test_a_node_of_another_cluster_is_reported_with_the_source_of_the_secret(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("BATON_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "secret").write_text(new_secret())
    async with StubNode() as node:
        with pytest.raises(UnfinishedRestart, match=r"UNAUTHENTICATED.*came from var/secret"):
            await _pause(node.address)


async def test_a_failed_handshake_is_reported_with_its_reason_and_the_flags(tmp_path):
    served = Authority().write(tmp_path / "served")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(served.cert, served.key)
    server = await asyncio.start_server(lambda _, w: w.close(), "127.0.0.1", 0, ssl=context)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    other = TlsConfig(ca=Authority().write_ca(tmp_path / "other"))
    fleet = Fleet((), tls.certificates(other, "--tls"), None)
    async with server:
        for call in (
            fleet.look(address),
            fleet.drain_node(address),
            fleet.get(f"https://{address}", "/requests"),
        ):
            with pytest.raises(UnfinishedRestart) as undone:
                await call
            assert "certificate" in str(undone.value).partition("): ")[0]
            assert "--tls-ca" in str(undone.value) and "--tls-cert" in str(undone.value)

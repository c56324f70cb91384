"""Without a secret, mutual TLS identifies a caller by the URIs of its certificate."""

import contextlib
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest
from prometheus_client import generate_latest

from common import rpc, tls
from common.config import ServerConfig
from common.errors import ConfigError
from common.identity.guard import uncounted
from common.identity.program import guard_of
from node.metrics import NodeMetrics
from protos import node_pb2, node_pb2_grpc
from tests.support.network.certificates import Authority
from tests.support.network.grpc_calls import serving, status_of

Code = grpc.StatusCode


class Service(node_pb2_grpc.NodeServicer):
    async def Describe(self, request, context):
        assert context.caller.name is None  # a certificate vouches for a role
        return node_pb2.DescribeResponse()

    async def Drain(self, request, context):
        return node_pb2.DrainResponse()


@pytest.fixture
def authority():
    return Authority()


@pytest.fixture
async def address(authority, tmp_path):
    config = authority.write(tmp_path / "node", roles=["node"])
    certificates = tls.certificates(config, "--server.tls")
    guard = guard_of(ServerConfig(port=1, tls=config), None, certificates, uncounted)
    add = node_pb2_grpc.add_NodeServicer_to_server
    async with serving((add, Service()), certificates=certificates, guard=guard) as address:
        yield address


@contextlib.asynccontextmanager
async def called_with(address, config):
    async with rpc.make_channel(address, tls.certificates(config, "the test's")) as channel:
        yield node_pb2_grpc.NodeStub(channel)


@pytest.mark.parametrize(
    "roles, describes, drains",
    [
        (["router"], Code.OK, Code.PERMISSION_DENIED),
        (["operator"], Code.OK, Code.OK),
        (["node"], Code.PERMISSION_DENIED, Code.PERMISSION_DENIED),
        (["node", "operator"], Code.OK, Code.OK),
        ([], Code.UNAUTHENTICATED, Code.UNAUTHENTICATED),
    ],
)
async def test_the_role_is_in_the_certificate(
    authority, address, tmp_path, roles, describes, drains
):
    # Seen failing if every certificate has every role.
    config = authority.write(tmp_path / "caller", roles=roles)
    async with called_with(address, config) as stub:
        code, sentence = await status_of(stub.Describe(node_pb2.DescribeRequest(), timeout=60))
        assert code is describes
        assert (await status_of(stub.Drain(node_pb2.DrainRequest(), timeout=60)))[0] is drains
    if not roles:
        assert "no URI urn:baton:ROLE" in sentence


def test_a_secret_takes_precedence_over_certificates_and_one_sided_tls_identifies_no_caller(
    authority, tmp_path
):
    config = authority.write(tmp_path)
    beyond = {"port": 1, "host": "0.0.0.0"}
    one_way = config.model_copy(update={"ca": None})
    certificates = tls.certificates(one_way, "--server.tls")
    with pytest.raises(ConfigError, match="reachable from other hosts"):
        guard_of(ServerConfig(tls=one_way, **beyond), None, certificates, uncounted)
    certificates = tls.certificates(config, "--server.tls")
    assert guard_of(ServerConfig(tls=config, **beyond), None, certificates, uncounted)


def test_a_metric_has_the_expiry_of_certificates(authority, tmp_path):
    soon, later = datetime(2031, 1, 2, tzinfo=UTC), datetime(2032, 1, 2, tzinfo=UTC)
    config = authority.write(tmp_path, not_after=soon)
    certificates = tls.certificates(config, "--server.tls")
    metrics = NodeMetrics("decode")
    assert b"baton_certificate_end_timestamp_seconds{" not in generate_latest(metrics.registry)
    metrics.trust.certificate_ends("shown", lambda: tls.shown_end(certificates))
    metrics.trust.certificate_ends("authority", lambda: tls.authority_end(certificates))

    def end(purpose):
        name = "baton_certificate_end_timestamp_seconds"
        return metrics.registry.get_sample_value(name, {"purpose": purpose})

    assert end("shown") == soon.timestamp()
    assert end("authority") > datetime.now(UTC).timestamp()
    assert end("shown_to_nodes") is None
    authority.write(tmp_path, not_after=later)
    assert end("shown") == later.timestamp()

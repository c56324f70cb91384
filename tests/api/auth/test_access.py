"""Each gRPC method and HTTP path of a router has an entry with the role that may use it."""

from typing import Any, get_args

import pytest

from api.auth.guard import Access, ApiKeyGuard
from api.grpc.service import CallerResolver
from api.http_checks import METHODS, PATHS, PATHS_BELOW
from api.program import paths
from api.program.nodes import make_clients
from common.config import ClientsConfig, RouterConfig, ServerConfig
from common.errors import Unauthenticated
from common.identity.guard import MAY_CALL
from common.identity.secret import new_secret
from protos import decode_pb2, kvtransfer_pb2, node_pb2, pooling_pb2, ranks_pb2, router_pb2
from router.metrics import RouterMetrics
from tests.api.rig import api_for

PAGE = "/page/"


async def test_exactly_the_served_paths_and_methods_have_an_entry(model, monkeypatch):
    served: list[str] = []
    methods: list[str] = []

    def routes(*parts: Any, **named: Any) -> Any:
        made = real_routes(*parts, **named)
        served.extend(made.paths)
        return made

    def of(callers: CallerResolver, method: str) -> Any:
        methods.append(method)
        return real_of(callers, method)

    real_routes, real_of = paths.routes, CallerResolver.of
    monkeypatch.setattr(paths, "routes", routes)
    monkeypatch.setattr(CallerResolver, "of", of)
    async with api_for(model):
        pass
    entries = {*PATHS, *PATHS_BELOW}
    assert {path for path in served if not path.startswith(PAGE)} == entries - {PAGE}
    assert sorted(methods) == sorted(METHODS)


def test_every_method_of_the_protocol_is_in_a_table():
    files = (decode_pb2, kvtransfer_pb2, node_pb2, pooling_pb2, ranks_pb2, router_pb2)
    named = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert named == {each for each in (*MAY_CALL, *METHODS) if each.startswith("/baton.")}


async def test_a_path_without_an_entry_prevents_the_router_from_starting(model, monkeypatch):
    monkeypatch.delitem(PATHS, "/tokenize")
    with pytest.raises(KeyError, match="/tokenize"):
        async with api_for(model):
            pass


async def test_a_path_without_an_entry_is_forbidden_for_everyone(api, monkeypatch):
    assert (await api.post("/tokenize", prompt="a")).status == 200
    monkeypatch.delitem(PATHS, "/tokenize")
    answer = await api.post("/tokenize", prompt="a")
    assert answer.status == 404 and "no such path: /tokenize" in answer.body.decode()


@pytest.mark.parametrize("method", ["/baton.v1.Router/New", "/baton.v1.Other/Generate"])
def test_a_method_without_an_entry_prevents_the_router_from_starting(method):
    with pytest.raises(KeyError, match=method):
        CallerResolver(ApiKeyGuard.__new__(ApiKeyGuard)).of(method)


@pytest.mark.parametrize(
    "host, insecure, has_secret, has_keys, needs_key",
    [
        ("127.0.0.1", False, False, False, []),
        ("127.0.0.1", False, True, False, ["commander"]),
        ("0.0.0.0", False, True, False, ["operator", "commander"]),
        ("0.0.0.0", True, False, False, []),
        ("0.0.0.0", True, True, False, ["commander"]),
        ("127.0.0.1", False, False, True, ["client", "operator", "commander"]),
        ("0.0.0.0", True, True, True, ["client", "operator", "commander"]),
    ],
)
def test_paths_that_require_a_key_are_those_in_the_docs(
    tmp_path, keys, host, insecure, has_secret, has_keys, needs_key
):
    """docs/clients.md, "Without API keys"."""
    file = tmp_path / "secret"
    file.write_text(new_secret())
    front = ServerConfig(
        port=0, host=host, insecure=insecure, secret_file=file if has_secret else None
    )
    config = RouterConfig(model="any", server=front, clients=keys if has_keys else ClientsConfig())
    guard = make_clients(config, RouterMetrics()).guard
    refused: list[Access] = []
    for access in get_args(Access):
        try:
            guard.identify(access, "", "192.0.2.1")
        except Unauthenticated:
            refused.append(access)
    assert refused == needs_key

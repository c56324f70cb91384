"""Each gRPC method and HTTP path of a router has an entry that says who may use it."""

from pathlib import Path
from typing import Any

import pytest

from common.identity.roles import MAY_CALL
from protos import decode_pb2, kvtransfer_pb2, node_pb2, pooling_pb2, router_pb2
from router.api import paths
from router.api.access import METHODS, PATHS, PATHS_BELOW
from router.api.callers import Callers
from router.clients.guard import Guard
from tests.router.openai_rig import api_for

PAGE = "/page/"


async def test_every_path_and_method_that_is_served_has_an_entry_and_no_other_has(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    methods: list[str] = []

    def routes(*parts: Any, **named: Any) -> Any:
        made = real_routes(*parts, **named)
        served.extend(made.paths)
        return made

    def of(callers: Callers, method: str) -> Any:
        methods.append(method)
        return real_of(callers, method)

    real_routes, real_of = paths.routes, Callers.of
    monkeypatch.setattr(paths, "routes", routes)
    monkeypatch.setattr(Callers, "of", of)
    async with api_for(model):
        pass
    entries = {*PATHS, *PATHS_BELOW}
    assert {path for path in served if not path.startswith(PAGE)} == entries - {PAGE}
    assert sorted(methods) == sorted(METHODS)


def test_every_method_of_the_protocol_is_in_a_table() -> None:
    files = (decode_pb2, kvtransfer_pb2, node_pb2, pooling_pb2, router_pb2)
    named = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert named == {each for each in (*MAY_CALL, *METHODS) if each.startswith("/baton.")}


async def test_a_path_without_an_entry_keeps_the_router_from_starting(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PATHS, "/tokenize")
    with pytest.raises(KeyError, match="/tokenize"):
        async with api_for(model):
            pass


async def test_a_path_without_an_entry_is_served_to_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_for(model) as api:
        assert (await api.post("/tokenize", prompt="a")).status == 200
        monkeypatch.delitem(PATHS, "/tokenize")
        answer = await api.post("/tokenize", prompt="a")
        assert answer.status == 404 and "nothing at /tokenize" in answer.body.decode()


@pytest.mark.parametrize("method", ["/baton.v1.Router/New", "/baton.v1.Other/Generate"])
def test_a_method_without_an_entry_keeps_the_router_from_starting(method: str) -> None:
    with pytest.raises(KeyError, match=method):
        Callers(Guard.__new__(Guard)).of(method)

"""Operator commands that are one call: the process called, the request, and the output."""

import argparse
import json
from typing import Any

import pytest

from cli.operating import command
from cli.operating.__main__ import OPERATIONS, parser
from cli.operating.fleet import Fleet
from protos import router_pb2
from protos.router_pb2 import (
    ContinueResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    MoveRequest,
    MoveResponse,
    PauseRequest,
    PauseResponse,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)

ROUTER, NODE = "127.0.0.1:50100", "10.0.0.7:50200"


class RecordingFleet(Fleet):
    """A fleet whose processes all give the same response.

    Attributes:
        calls: address, method and request of each call.
    """

    def __init__(self, answer: Any) -> None:
        super().__init__((), None, None)
        self.answer = answer
        self.calls: list[tuple[str, str, Any]] = []

    async def call_node(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        self.calls.append((address, method, request))
        return self.answer

    call_router = call_node


def _options(name: str, *arguments: str) -> argparse.Namespace:
    return parser(name).parse_args([*arguments, f"--router={ROUTER}"])


async def _output(fleet: Fleet, name: str, *arguments: str) -> str:
    return (await OPERATIONS[name].work(_options(name, *arguments), fleet)).text


@pytest.mark.parametrize(
    "name, method, output",
    [
        ("nodes sleep", "ReleaseMemory", "memory released"),
        ("nodes wake", "ResumeMemory", "memory allocated"),
    ],
)
async def test_sleep_and_wake_call_one_node_or_the_router(name, method, output):
    fleet, request = RecordingFleet(None), getattr(router_pb2, f"{method}Request")
    assert await _output(fleet, name) == output
    assert await _output(fleet, name, "--only", "kv_cache", NODE) == output
    assert fleet.calls == [(ROUTER, method, request()), (NODE, method, request(tags=["kv_cache"]))]


@pytest.mark.parametrize(
    "arguments, answer, request_, output",
    [
        ("nodes pause", PauseResponse(fresh=True), PauseRequest(mode="abort"), "paused"),
        (
            "nodes pause --mode=retract",
            PauseResponse(aborted=2),
            PauseRequest(mode="retract"),
            "already paused, 2 requests aborted",
        ),
        ("nodes resume", ContinueResponse(was_paused=True), None, "resumed"),
        ("nodes resume", ContinueResponse(), None, "no node was paused"),
        (
            "nodes update-weights step-7 --abort",
            UpdateWeightsResponse(id=b"\x0a", aborted=1),
            UpdateWeightsRequest(path="step-7", abort=True),
            "all nodes use weights 0a, 1 requests aborted",
        ),
        (
            f"nodes update-weights --from={NODE}",
            UpdateWeightsResponse(id=b"\x0a"),
            UpdateWeightsRequest(from_node=NODE),
            "all nodes use weights 0a",
        ),
        (
            "requests migrate r1",
            MoveResponse(request_id="r1", source="a:1", target=NODE),
            MoveRequest(request_id="r1"),
            f"r1 migrated from a:1 to {NODE}",
        ),
        (
            f"requests migrate r1 {NODE}",
            MoveResponse(request_id="r1", source="a:1", target=NODE),
            MoveRequest(request_id="r1", target=NODE),
            f"r1 migrated from a:1 to {NODE}",
        ),
        (
            "adapters load sql adapters/sql",
            LoadAdapterResponse(id=b"\x01", fresh=True),
            LoadAdapterRequest(name="sql", path="adapters/sql"),
            "loaded, content 01",
        ),
        (
            "adapters unload sql",
            UnloadAdapterResponse(known=True),
            UnloadAdapterRequest(name="sql"),
            "unloaded",
        ),
    ],
)
async def test_a_call_sends_its_options_and_prints_the_response(
    arguments, answer, request_, output
):
    fleet = RecordingFleet(answer)
    group, word, *rest = arguments.split()
    assert await _output(fleet, f"{group} {word}", *rest) == output
    ((address, _, sent),) = fleet.calls
    assert address == ROUTER
    assert request_ is None or sent == request_


def test_json_has_every_field_of_the_response():
    assert json.loads(command.json_text(PauseResponse(fresh=True))) == {"fresh": True, "aborted": 0}


@pytest.mark.parametrize("name", ["nodes set-role", "nodes drain", "rollout"])
def test_progress_goes_to_standard_error_with_json(name, capsys):
    place = {"nodes set-role": (NODE, "prefill"), "nodes drain": (NODE,)}.get(name, ())
    command.report(_options(name, *place), "one")
    command.report(_options(name, *place, "--json"), "two")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("one\n", "two\n")

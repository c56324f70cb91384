"""`baton pause`, `continue`, `sleep` and `wake`: who is told what, and what is said then."""

from typing import Any

import pytest

from cli import orders
from cli.main import COMMANDS
from cli.operating.fleet import Fleet
from protos import router_pb2
from protos.router_pb2 import ContinueResponse, PauseRequest, PauseResponse

ROUTER, NODE = "127.0.0.1:50100", "10.0.0.7:50200"


class Told(Fleet):
    """A fleet whose processes all give the same response."""

    def __init__(self, answer: Any) -> None:
        super().__init__((), None, None)
        self.answer = answer
        self.told: list[tuple[str, str, Any]] = []

    async def tell_node(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        self.told.append((address, method, request))
        return self.answer

    tell_router = tell_node


async def _said(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, name: str, *arguments: str
) -> str:
    options = orders.parse(name, [*arguments, f"--router={ROUTER}"])
    await orders.give(orders.ORDERS[name], options, fleet)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name, method, done",
    [("sleep", "ReleaseMemory", "given back\n"), ("wake", "ResumeMemory", "taken again\n")],
)
async def test_one_node_or_all_sleep_and_wake_wholly_or_in_part(
    name: str, method: str, done: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, asked = Told(None), getattr(router_pb2, f"{method}Request")
    assert await _said(capsys, fleet, name) == done
    assert await _said(capsys, fleet, name, "--only", "kv_cache", NODE) == done
    assert fleet.told == [(ROUTER, method, asked()), (NODE, method, asked(tags=["kv_cache"]))]


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("pause", PauseResponse(fresh=True), "paused\n"),
        ("pause", PauseResponse(aborted=2), "it was paused already; 2 requests have ended\n"),
        ("continue", ContinueResponse(was_paused=True), "continued\n"),
        ("continue", ContinueResponse(), "nothing was paused\n"),
    ],
)
async def test_what_came_of_it_is_said(
    name: str, answer: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _said(capsys, Told(answer), name) == said


async def test_a_pause_has_a_mode(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Told(PauseResponse(fresh=True))
    await _said(capsys, fleet, "pause")
    await _said(capsys, fleet, "pause", "--mode=retract")
    modes = [PauseRequest(mode="abort"), PauseRequest(mode="retract")]
    assert [request for _, _, request in fleet.told] == modes


def test_all_of_them_are_commands() -> None:
    commands = {name for name, command in COMMANDS.items() if command.module == orders.__name__}
    assert commands == set(orders.ORDERS)
    assert all(COMMANDS[name].first == (name,) for name in commands)

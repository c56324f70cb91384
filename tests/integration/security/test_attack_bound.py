"""The limit of `make attack` detects a client that delays another one, and only that."""

import asyncio
import json

import pytest

from tests.attack import bound
from tests.attack.bound import Bound, ShortAnswers
from tests.attack.verdict import of_delays

STALL_S = 1.5


class Router:
    """Answers at once, except while an arm has stopped its event loop."""

    def __init__(self) -> None:
        self.stalled_until = 0.0
        self.attacks: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                await asyncio.sleep(self.stalled_until - loop.time())
                body = json.dumps({"choices": [{"text": " 3"}]}).encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode())
                writer.write(body)
        except asyncio.IncompleteReadError:
            writer.close()

    async def attack(self, arm: str) -> None:
        """Stall once in each window. `once` stalls in its first window only."""
        first = arm not in self.attacks
        self.attacks.append(arm)
        await asyncio.sleep(bound.WINDOW_S)
        if arm == "stalls" or (arm == "once" and first):
            self.stalled_until = asyncio.get_running_loop().time() + STALL_S
            await asyncio.sleep(STALL_S)


@pytest.mark.long
async def test_only_an_arm_that_delays_another_client_each_time_breaks_the_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(bound, "WINDOW_S", 0.5)
    monkeypatch.setattr(bound, "MIN_CALM_S", 0.2)  # a busy machine delays this test, too
    router = Router()

    async def settle(arm: str) -> None:
        assert arm == router.attacks[-1]

    server = await asyncio.start_server(router.serve, "127.0.0.1", 0)
    async with server:
        answers = ShortAnswers(server.sockets[0].getsockname()[1], "key")
        delays = await Bound(answers, router.attack, settle).delays(["quiet", "stalls", "once"])
    (complaint,) = of_delays(delays)
    assert "the arm stalls has delayed" in complaint
    assert router.attacks == ["quiet", "stalls", "stalls", "once", "once"]
    assert answers.served.wrong == answers.served.failed == []

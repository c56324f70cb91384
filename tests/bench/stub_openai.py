"""An OpenAI server for tests of clients: it sends a scripted response, and records the times of its
writes.

It runs in the test's process and event loop, so both ends read the same clock.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = {"id": "stub", "max_model_len": 10_000}


@dataclass(frozen=True, slots=True)
class Script:
    """One response. `chunks` are numbers of tokens. Each is sent `gap_s` after the previous one."""

    chunks: Sequence[int] = (1, 1, 1)
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    error: str = ""  # sent instead of the last chunk, as servers do in mid-stream
    cut: bool = False  # the connection ends after the chunks, without [DONE]
    closes: bool = False  # the connection, after the whole response, as announced in a header
    usage: bool = True
    usage_in_chunks: bool = False


@dataclass(slots=True)
class Seen:
    """One request that the stub received."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    came: float
    wrote: list[float] = field(default_factory=list)  # perf_counter() before each chunk


class StubOpenAi:
    def __init__(self, script: Callable[[int], Script]) -> None:
        self._script = script
        self.seen: list[Seen] = []
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # asyncio's own callback would report a cancelled connection as an error
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the connection is kept."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if method == "GET":
            writer.write(_whole(200, {"object": "list", "data": [MODEL]}))
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        seen = Seen(path, headers, body, time.perf_counter())
        script = self._script(len(self.seen))
        self.seen.append(seen)
        if script.status != 200:
            error = {"message": f"status {script.status} it is", "type": "test"}
            writer.write(_whole(script.status, {"error": error}))
            return True
        await self._stream(script, seen, writer)
        return not (script.cut or script.closes)

    async def _stream(self, script: Script, seen: Seen, writer: asyncio.StreamWriter) -> None:
        connection = b"connection: close\r\n" if script.closes else b""
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            + connection
            + b"transfer-encoding: chunked\r\n\r\n"
        )
        told, prompt = 0, seen.body.get("prompt", "")
        if seen.path.endswith("/chat/completions"):
            writer.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for index, tokens in enumerate(script.chunks):
            at_least = seen.wrote[-1] + script.gap_s if index else seen.came + script.first_s
            await until(at_least)
            told += tokens
            text = "x" * tokens
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            if seen.path.endswith("/chat/completions"):
                choice["delta"] = {"content": text}
            else:
                choice["text"] = text
            content: dict[str, Any] = {"choices": [choice], "usage": None}
            if script.usage_in_chunks:
                content["usage"] = _usage(len(prompt), told)
            seen.wrote.append(time.perf_counter())
            writer.write(_event(content))
            await writer.drain()
        if script.cut:
            return
        if script.error:
            writer.write(_event({"error": {"message": script.error}}) + b"0\r\n\r\n")
            return
        if script.usage:
            writer.write(_event({"choices": [], "usage": _usage(len(prompt), told)}))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def until(at: float) -> None:
    """Return when time.perf_counter() has reached `when`, and never before, unlike a single
    sleep."""
    left = at - time.perf_counter()
    while left > 0:
        await asyncio.sleep(left)
        left = at - time.perf_counter()


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def _event(content: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _whole(status: int, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def stub_openai(script: Callable[[int], Script]) -> AsyncIterator[StubOpenAi]:
    """Args:
    script: the response to each request, by its number.
    """
    stub = StubOpenAi(script)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.close()
        await stub.stop()

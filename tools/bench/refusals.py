"""Measure the cost of rejected inputs for a router: blocked time of its event loop, memory, CPU.

    python -m tools.bench.refusals [--context 131072] [--only NAME]

One router without nodes has a vocabulary of 16,000 tokens made of this repository's own sources.
Each input is sent once, alone, while a client polls /health continuously. The longest wait of a
poll is the time for which the event loop was blocked, on an otherwise idle machine. The CPU time of
the loop's thread, including the receipt of the input, is an upper bound on any machine. Memory is
the growth of the process's peak. The last row is not a rejection: 1,400 characters behind eight
texts of a million.

Goals: no poll waits longer than 100 ms, and memory grows by no more than a few times the input.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import grpc.aio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protos.router_pb2 import GenerateRequest, TokenIds, TokenizeRequest
from tools.bench.support.record import ROOT, emit, table

HOST = "127.0.0.1"
READY_S = 60.0
ANSWER_S = 120.0
PING_EVERY_S = 0.005
AFTERWARDS_S = 0.2  # the memory of an input is freed once its response is sent
MOST = (12 << 20) - 1024  # bytes of an input
VOCABULARY = 16_000
COLUMNS = {
    "input": "{name}",
    "MB": "{mb:.1f}",
    "stall ms": "{stall_ms:.0f}",
    "loop ms": "{loop_ms:.0f}",
    "answer s": "{answer_s:.2f}",
    "CPU s": "{cpu_s:.2f}",
    "MiB more": "{grown_mib:.0f}",
    "answer": "{answer}",
}


@dataclass(frozen=True, slots=True)
class Router:
    pid: int
    http_port: int
    port: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def loop_ms(self) -> float:
        """Return the CPU milliseconds of the event loop's thread."""
        ran_ns = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]
        return int(ran_ns) / 1e6

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def memory_mib(self, name: str) -> float:
        """Return a memory figure in MiB. `name`: "VmRSS" or "VmHWM", its peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@dataclass(frozen=True, slots=True)
class Input:
    """One message. `path` is that of an HTTP endpoint or of a gRPC method."""

    path: str
    make: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    mb: float
    stall_ms: float
    loop_ms: float
    answer_s: float
    cpu_s: float
    grown_mib: float
    answer: str


def _json(before: str, item: str, after: str) -> Callable[[], bytes]:
    """Return a maker of the longest allowed body, with repeated items between `before` and
    `after`."""
    num = (MOST - len(before) - len(after)) // (len(item.encode()) + 1)
    return lambda: (before + ",".join([item] * num) + after).encode()


def _fields(field: int, item: bytes) -> Callable[[], bytes]:
    """Return a maker of a gRPC message with one field that holds `item` repeatedly."""
    num = (MOST - 16) // len(item)
    return lambda: bytes([field << 3 | 2]) + _varint(num * len(item)) + item * num


def _varint(number: int) -> bytes:
    low = [number >> shift & 127 for shift in range(0, number.bit_length(), 7)]
    return bytes([*(byte | 128 for byte in low[:-1]), low[-1]])


def _prompt(text: str) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": _long(text, MOST - 20 - MOST // 16)}).encode()


def _long(text: str, num_characters: int) -> str:
    return (text * (num_characters // len(text) + 1))[:num_characters]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE, TOKENIZE = "/baton.v1.Router/Generate", "/baton.v1.Router/Tokenize"
DETOKENIZE = "/baton.v1.Router/Detokenize"
WORDS = "the quick brown fox jumps over the lazy dog, and again; "
BEHIND_EIGHT = "short behind eight"
MESSAGE = '{"role":"user"}'
INPUTS: Mapping[str, Input] = {
    "text": Input(COMPLETIONS, _prompt(WORDS)),
    "spaces": Input(COMPLETIONS, _prompt(" ")),
    "token ids": Input(COMPLETIONS, _json('{"prompt":[', "1", "]}")),
    "empty lists": Input(COMPLETIONS, _json('{"prompt":[', "[]", "]}")),
    "empty texts": Input(COMPLETIONS, _json('{"prompt":[', '""', "]}")),
    "logit_bias": Input(COMPLETIONS, _json('{"prompt":"a","logit_bias":{', '"1":1', "}}")),
    "stop": Input(COMPLETIONS, _json('{"prompt":"a","stop":[', '""', "]}")),
    "model": Input(COMPLETIONS, lambda: b'{"prompt":"a","model":"%b"}' % (b"\x7f" * (MOST - 40))),
    "messages": Input(CHAT, _json('{"messages":[', MESSAGE, "]}")),
    "tools": Input(CHAT, _json('{"messages":[],"tools":[', "{}", "]}")),
    "tool_calls": Input(CHAT, _json('{"messages":[{"role":"user","tool_calls":[', "[]", "]}]}")),
    "n = 128": Input(
        CHAT,
        lambda: (
            b'{"n":128,"messages":[%b]}'
            % b",".join([b'{"role":"user","content":""}'] * (MOST // 128 // 29 - 1))
        ),
    ),
    "gRPC messages": Input(GENERATE, _fields(3, b"\x0a\x00")),
    "gRPC token ids": Input(
        GENERATE,
        lambda: GenerateRequest(token_ids=TokenIds(ids=[1] * (MOST - 100))).SerializeToString(),
    ),
    "gRPC stop": Input(GENERATE, _fields(5, b"\x3a\x00")),
    "gRPC Tokenize": Input(
        TOKENIZE,
        lambda: TokenizeRequest(text=_long(WORDS, MOST - 100)).SerializeToString(),
    ),
    "gRPC Detokenize": Input(DETOKENIZE, _fields(1, b"\x05")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=131_072, help="tokens")
    parser.add_argument("--only", default="", metavar="NAME", help="part of an input's name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-refusals-") as made:
        model = _write_model(Path(made), options.context)
        with _router(model) as router:
            rows = asyncio.run(_measure(router, options.only))
    table([asdict(row) for row in rows], COLUMNS)
    emit("refusals", {"context": options.context}, [asdict(row) for row in rows])


async def _measure(router: Router, only: str) -> list[Row]:
    await _until_alive(router)
    rows = []
    for name, given in INPUTS.items():
        if only not in name:
            continue
        data = given.make()
        rows.append(await _row(router, name, len(data), _answer(router, given.path, data)))
    if only in BEHIND_EIGHT:
        rows.append(await _row(router, BEHIND_EIGHT, 0, _behind_eight(router)))
    return rows


async def _row(router: Router, name: str, num_bytes: int, ask: Awaitable[str]) -> Row:
    async with _pinging(router) as waits:
        await asyncio.sleep(0.5)  # lets the router release the memory of the previous input
        router.forget_peak()
        memory_mib, cpu_s = router.memory_mib("VmRSS"), router.cpu_s()
        loop_ms = router.loop_ms()
        waits.clear()
        began = time.perf_counter()
        answer = await ask
        answer_s = time.perf_counter() - began
        loop_ms = router.loop_ms() - loop_ms
    return Row(
        name=name,
        mb=num_bytes / 1e6,
        stall_ms=max(waits) * 1000,
        loop_ms=loop_ms,
        answer_s=answer_s,
        cpu_s=router.cpu_s() - cpu_s,
        grown_mib=max(0.0, router.memory_mib("VmHWM") - memory_mib),
        answer=answer[:100],
    )


async def _behind_eight(router: Router) -> str:
    """Return the wait of 1,400 characters behind eight million."""
    long = TokenizeRequest(text=_long(WORDS, 1_000_000)).SerializeToString()
    short = TokenizeRequest(text=_long(WORDS, 1_400)).SerializeToString()
    tasks = [asyncio.create_task(_answer(router, TOKENIZE, long)) for _ in range(8)]
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    await _answer(router, TOKENIZE, short)
    waited_s = time.perf_counter() - began
    answers = await asyncio.gather(*tasks)
    return f"{waited_s * 1000:.0f} ms; the eight: {answers[0]}"


async def _answer(router: Router, path: str, data: bytes) -> str:
    async with asyncio.timeout(ANSWER_S):
        if path.startswith("/v1"):
            return await _posted(router, path, data)
        return await _called(router, path, data)


async def _posted(router: Router, path: str, data: bytes) -> str:
    reader, writer = await asyncio.open_connection(HOST, router.http_port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    try:
        status = await reader.readline()
        length = 0
        while line := (await reader.readline()).strip().lower():
            if line.startswith(b"content-length:"):
                length = int(line.split()[1])
        body = await reader.readexactly(length)
        return f"{status.split()[1].decode()} ({length} bytes) {body.decode()}"
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        return f"closed: {error}"
    finally:
        writer.close()


async def _called(router: Router, path: str, data: bytes) -> str:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"{HOST}:{router.port}", options=options) as channel:
        try:
            if path == GENERATE:
                async for _ in channel.unary_stream(path)(data):
                    pass
            else:
                await channel.unary_unary(path)(data)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
    return "OK"


@asynccontextmanager
async def _pinging(router: Router) -> AsyncIterator[list[float]]:
    """Yield a list that receives the seconds of each response."""
    waits: list[float] = []
    over = asyncio.Event()
    reader, writer = await asyncio.open_connection(HOST, router.http_port)

    async def ping() -> None:
        while not over.is_set():
            began = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"alive"}')
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(PING_EVERY_S)

    pinging = asyncio.create_task(ping())
    yield waits
    await asyncio.sleep(AFTERWARDS_S)
    over.set()
    await pinging  # until the last response
    writer.close()


async def _until_alive(router: Router) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, router.http_port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


@contextmanager
def _router(model: Path) -> Iterator[Router]:
    http_port, port, nobody = _free_ports(3)
    command = [sys.executable, "-m", "router", "--model", str(model), "--log-level", "error"]
    command += ["--host", HOST, "--port", str(port), "--http-port", str(http_port)]
    command += ["--decode", f"{HOST}:{nobody}"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield Router(process.pid, http_port, port)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _free_ports(num: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _write_model(directory: Path, context: int) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(ROOT.glob("*/**/*.py"))], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "max_position_embeddings": context,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


if __name__ == "__main__":
    main()

"""A tiny model to tokenise with, and a router in this process around stub nodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from api.program.assembly import RunningRouter, run_router
from api.text import model_files
from common import rpc
from common.config import ClientsConfig, RouterConfig, ServerConfig
from protos import router_pb2, router_pb2_grpc
from tests.support.stub_decode_node import StubDecodeNode, Submission

CONTEXT_LENGTH = 64
VOCABULARY_SIZE = 320
WAIT_S = 60.0
# Of requests that are to run out of time at their node; a busy machine spends the first on the way.
BUDGETS_S = [0.25 * 2**number for number in range(9)]
ON_ANY_PORT = ServerConfig(port=0)
AT_ONCE = ClientsConfig(max_queue_wait_s=0)  # no request waits for a slot
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Bytes and some merges; ids 0 and 1 are <s>, which starts every text, and </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the quick brown fox jumps over the lazy dog; größer STOP"
    tokenizer.train_from_iterator([words] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: words include their leading space, and unknown characters
    are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


def write_model(
    directory: Path, *, context_length: int = CONTEXT_LENGTH, **tokenizer_config: Any
) -> Path:
    """A checkpoint without weights."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "max_position_embeddings": context_length,
        "vocab_size": VOCABULARY_SIZE,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    content = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **tokenizer_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory


class Client:
    """Calls one router; leaves errors as grpc.aio.AioRpcError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def generate(self, text: str = "", **fields: Any) -> Any:
        """A Generate call; `text` unless `fields` has another prompt."""
        if text:
            fields["text"] = text
        return self.stub.Generate(router_pb2.GenerateRequest(**fields), timeout=WAIT_S)

    async def wait_until_serving(self, serving: bool = True) -> None:
        wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(
            "SERVING" if serving else "NOT_SERVING"
        )
        watch = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        async for response in watch:
            if response.status == wanted:
                watch.cancel()
                return


async def submitted_or_over(node: StubDecodeNode, over: "asyncio.Task[Any]") -> Submission | None:
    """A request's Submit; None if the request is over and its node has had none."""
    submitted = asyncio.create_task(node.submitted())
    await asyncio.wait((submitted, over), return_when="FIRST_COMPLETED")
    if submitted.done():
        return submitted.result()
    submitted.cancel()
    return None


async def rest(call: Any) -> list[router_pb2.GenerateResponse]:
    """Every further message of a Generate call."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def collect(call: Any) -> tuple[str, list[int], router_pb2.GenerateResponse]:
    """All text and ids of a Generate call, and its last message."""
    messages = await rest(call)
    text = "".join(message.text for message in messages)
    return text, [token for message in messages for token in message.token_ids], messages[-1]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call must end with."""
    try:
        await collect(call) if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)


@asynccontextmanager
async def router_for(
    model: Path,
    *,
    decode: Sequence[str],
    prefill: Sequence[str] = (),
    front: ServerConfig = ON_ANY_PORT,
    **knobs: Any,
) -> AsyncIterator[tuple[Client, RunningRouter]]:
    """A router on ports of its own, and a client of it; it may not be ready yet."""
    config = RouterConfig(
        server=front,
        http_port=0,
        model=str(model),
        decode=tuple(decode),
        prefill=tuple(prefill),
        **knobs,
    )
    async with run_router(config, model_files.load(config.model)) as router:
        async with rpc.make_channel(f"127.0.0.1:{router.port}") as channel:
            yield Client(channel), router


async def eventually(holds: Any) -> None:
    """For what shows nowhere but in a value: looks again until it holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  (nobody sets an event for it)
            await asyncio.sleep(0.005)

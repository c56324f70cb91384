"""Too large inputs at a running router: the rejection of each protocol, with its sentence."""

import grpc
import pytest

from api.requests.generate_params import MAX_FIELDS
from api.text.tokenizer import RouterTokenizer
from common.errors import MAX_SENTENCE_CHARACTERS, Overloaded
from protos import router_pb2
from protos.router_pb2 import ChatMessage, ChatMessages, DetokenizeRequest, TokenizeRequest
from protos.sampling_pb2 import Sampling
from tests.api.models import CONTEXT_LENGTH, write_model
from tests.api.rig import CHAT, COMPLETIONS, HELLO, Client, api_for, fails, router_for
from tests.support.network.http_client import post

Code = grpc.StatusCode
ROOM = 1 << 20
TEXT = CONTEXT_LENGTH * 16


async def test_over_grpc_too_large_input_is_rejected_by_size(model):
    async with router_for(model, decode=["127.0.0.1:1"]) as (client, _):
        for call, sentence in [
            (client.generate("x" * (TEXT + 1)), f"text has {TEXT + 1} bytes of text"),
            (_tokenize(client, text="x" * (TEXT + 1)), f"text has {TEXT + 1} bytes of text"),
            (
                _tokenize(client, messages=_messages(1, "x" * TEXT)),
                f"messages has {TEXT + 4} bytes of text",
            ),
            (
                client.stub.Detokenize(DetokenizeRequest(token_ids=[5] * 300_000)),
                "token_ids has 300000 tokens; the context has 64",
            ),
            (
                client.generate(token_ids=router_pb2.TokenIds(ids=[5] * 300_000)),
                "token_ids has 300000 tokens; the context of 64 tokens accepts prompts of at most "
                "63",
            ),
            (
                client.generate("x", sampling=Sampling(stop_token_ids=[5] * 300_000)),
                "sampling.stop_token_ids has 300000 ids, 16 allowed",
            ),
            (
                client.generate("x", sampling=Sampling(stop=["x"] * 10_000)),
                "sampling.stop has 10000 strings, 16 allowed",
            ),
            (
                client.generate(messages=_messages(MAX_FIELDS, "")),
                f"the message has more than {MAX_FIELDS} fields",
            ),
        ]:
            error = await fails(call, Code.INVALID_ARGUMENT)
            assert str(error.details()).startswith(sentence)


async def test_a_message_larger_than_any_prompt_is_rejected_before_it_is_received(model):
    async with router_for(model, decode=["127.0.0.1:1"]) as (client, _):
        await fails(
            _tokenize(client, text="x" * (ROOM + TEXT)), Code.RESOURCE_EXHAUSTED, str(ROOM + TEXT)
        )


async def test_over_http_too_large_input_is_rejected_by_size(api):
    for path, fields, status, param, sentence in [
        (COMPLETIONS, {"prompt": "x" * (TEXT + 1)}, 400, "prompt", f"has {TEXT + 1} bytes"),
        (CHAT, {"messages": _turn("x" * TEXT)}, 400, "messages", "bytes of text"),
        (COMPLETIONS, {"prompt": [5] * 100_000}, 400, "prompt", "has 100000 tokens"),
        (COMPLETIONS, {"prompt": [[]] * 100_000}, 413, None, "too many values"),
        (CHAT, {"messages": HELLO, "tools": [{}] * 100_000}, 413, None, "too many values"),
        (COMPLETIONS, {"prompt": "x" * 1_200_000}, 413, None, "may have at most"),
    ]:
        answer = await post(api.router.http_port, path, fields)
        assert answer.status == status, answer.body
        assert answer.error["param"] == param
        assert sentence in answer.error["message"]


@pytest.mark.parametrize("name", ["x" * 1000, "\U0001f600" * 1000, "\x00" * 100_000])
async def test_a_long_name_is_shortened_in_the_error(api, name):
    answer = await api.post(COMPLETIONS, prompt="x", model=name)
    assert answer.status in (400, 404)
    assert len(answer.error["message"]) <= MAX_SENTENCE_CHARACTERS


async def test_a_templates_error_about_messages_is_shortened(tmp_path):
    template = "{{ raise_exception('not this: ' + messages[0].content) }}"
    async with api_for(write_model(tmp_path, chat_template=template)) as api:
        answer = await api.post(CHAT, messages=_turn("\U0001f600" * 250))
        assert answer.status == 400
        assert "not this: \U0001f600" in answer.error["message"]
        answer = await api.post(CHAT, messages=_turn("x" * 900))
        assert len(answer.error["message"]) == MAX_SENTENCE_CHARACTERS


async def test_a_rejection_by_a_full_queue_has_a_retry_time(model, monkeypatch):
    async def full(*_: object, **__: object) -> list[int]:
        raise Overloaded("text waits")

    async with router_for(model, decode=["127.0.0.1:1"]) as (client, _):
        monkeypatch.setattr(RouterTokenizer, "encode", full)
        monkeypatch.setattr(RouterTokenizer, "decode_any", full)
        for call in (
            _tokenize(client, text="x"),
            client.stub.Detokenize(DetokenizeRequest(token_ids=[5])),
        ):
            error = await fails(call, Code.RESOURCE_EXHAUSTED)
            assert ("retry-after", "1") in tuple(error.trailing_metadata())


def _tokenize(client: Client, **fields: object) -> object:
    return client.stub.Tokenize(TokenizeRequest(**fields))  # type: ignore[arg-type]


def _messages(num: int, content: str) -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role="user", content=content)] * num)


def _turn(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]

"""The cache salt of a client, and the resulting namespace at the node."""

import asyncio
from typing import Any

import pytest

from api.requests.validation import MAX_SALT_CHARACTERS
from common.requests.namespace import IDENTITY_BYTES, namespace_of
from tests.api.models import ids
from tests.api.rig import CHAT, COMPLETIONS, HELLO, Api, Client, api_for, collect, failure
from tests.support.network.http_client import post
from tests.support.processes.stub_decode_node import StubDecodeNode

PROMPTS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": HELLO}}
LONG = "ß" * MAX_SALT_CHARACTERS
BOTH = pytest.mark.parametrize("path", PROMPTS)
BAD = pytest.mark.parametrize(
    "salt, sentence",
    [
        ("", "cache_salt is empty: omit it to share the cache"),
        (LONG + "x", f"cache_salt has {MAX_SALT_CHARACTERS + 1} characters, 512 allowed"),
    ],
    ids=["empty", "long"],
)


async def submitted(api: Api, path: str, **fields: Any) -> bytes:
    """Return the namespace that the node receives."""
    submit, _ = await api.ask(path, **PROMPTS[path], **fields)
    return submit.namespace


async def asked(client: Client, node: StubDecodeNode, **fields: Any) -> bytes:
    call = client.generate("x", **fields)
    submit = await node.complete(ids("y"))
    await collect(call)
    return submit.namespace


@BOTH
async def test_a_salt_gives_a_namespace_and_no_salt_the_shared_one(api, path):
    for salt in ("a", "b", " a", LONG, "\0"):
        namespace = await submitted(api, path, cache_salt=salt)
        assert namespace == namespace_of(salt) and len(namespace) == IDENTITY_BYTES
    assert await submitted(api, path) == b""
    assert await submitted(api, path, cache_salt=None) == b""


async def test_the_namespace_is_the_same_over_grpc(client, node):
    assert await asked(client, node, cache_salt="a") == namespace_of("a")
    assert await asked(client, node) == b""
    for salt in ("", LONG + "x"):
        error = await failure(client.generate("x", cache_salt=salt))
        assert error.code().name == "INVALID_ARGUMENT"
        assert str(error.details()).startswith("cache_salt ")


async def test_all_choices_of_all_prompts_have_the_namespace(api):
    fields = {"prompt": ["x", "y"], "n": 2, "cache_salt": "a"}
    asking = asyncio.create_task(api.post(COMPLETIONS, **fields))
    namespaces = [(await api.complete()).namespace for _ in range(4)]
    assert (await asking).status == 200
    assert namespaces == [namespace_of("a")] * 4


@BOTH
@BAD
async def test_an_empty_or_too_long_salt_is_rejected(api, path, salt, sentence):
    answer = await api.post(path, **PROMPTS[path], cache_salt=salt)
    assert (answer.status, answer.error["param"]) == (400, "cache_salt")
    assert answer.error["message"] == sentence


@pytest.mark.parametrize("salt", [b"7", b'["a"]', b'"\\ud800"', b'"\xff"'])
async def test_a_salt_must_be_text(api, salt):
    body = b'{"prompt":"x","cache_salt":' + salt + b"}"
    assert (await post(api.router.http_port, COMPLETIONS, body)).status == 400


async def test_cached_tokens_can_be_left_out_of_the_usage(model):
    async with api_for(model, hide_cached_tokens=True) as api:
        for path, prompt in PROMPTS.items():
            _, answer = await api.answered(api.post(path, **prompt), cached_tokens=1)
            usage = answer.json["usage"]
            assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}

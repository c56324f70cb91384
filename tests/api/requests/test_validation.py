"""Invalid input is rejected with a sentence that names the field."""

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from api.auth.client import by_address
from api.dialect.fields import GenerationFields, choices, samplings
from api.grpc.parsing import from_request
from api.parsers.model_format import ModelFormat
from api.requests import validation
from api.requests.generate_params import MAX_MESSAGES, GenerateParams, ModelLimits, TextPrompt
from api.requests.generate_params import TokenIdsPrompt as PromptIds
from api.requests.prompts import PromptEncoder
from api.requests.validation import MAX_STOP_CHARACTERS, budget_s, parse
from api.text.chat_template import ChatTemplate
from api.text.tokenizer import RouterTokenizer
from common.config import RouterConfig
from common.errors import ConfigError, InvalidRequest
from common.requests.sampling import SamplingParams
from kvtransfer.pairs.codec import MAX_BUDGET_S
from protos.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.api.models import CHAT_TEMPLATE, CONTEXT_LENGTH, VOCABULARY_SIZE, byte_level_tokenizer

CLIENT = by_address("192.0.2.1")
LIMITS = ModelLimits(CONTEXT_LENGTH, VOCABULARY_SIZE, longest_token_bytes=16)
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<s>"})


def prompts() -> PromptEncoder:
    tokenizer = RouterTokenizer(byte_level_tokenizer().to_str().encode())
    return PromptEncoder(tokenizer, TEMPLATE, LIMITS, ModelFormat())


def tokens(*ids: int) -> TokenIds:
    return TokenIds(ids=ids)


def messages(*turns: tuple[str, str]) -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role=role, content=text) for role, text in turns])


async def parsed(**fields: Any) -> SamplingParams:
    """Return the sampling options of a valid gRPC request with these fields."""
    request = from_request(GenerateRequest(**fields))
    return (await parse(request, "r", prompts(), LIMITS, CLIENT)).spec.sampling


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({}, "prompt is missing: set one of text, messages, token_ids"),
        ({"token_ids": tokens()}, "token_ids is empty"),
        ({"token_ids": tokens(*[5] * CONTEXT_LENGTH)}, f"token_ids has {CONTEXT_LENGTH} tokens"),
        ({"text": "xyzw" * CONTEXT_LENGTH}, "text has "),
        (
            {"token_ids": tokens(5, VOCABULARY_SIZE)},
            rf"token_ids\[1\]: token {VOCABULARY_SIZE} is outside",
        ),
        ({"token_ids": tokens(2**32 - 1)}, r"token_ids\[0\]: token 4294967295 is outside"),
        ({"messages": messages()}, "messages must have at least one"),
        (
            {"messages": messages(*[("user", "x")] * (MAX_MESSAGES + 1))},
            f"messages has {MAX_MESSAGES + 1} messages, {MAX_MESSAGES} allowed",
        ),
        ({"messages": messages(("", "x"))}, r"messages\[0\].role is empty"),
        ({"messages": messages(("tool", "x"))}, "messages: refused by .*: no tools here"),
    ],
)
async def test_an_invalid_prompt_is_rejected(fields, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        await parsed(**fields)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        *(({"temperature": each}, "sampling.temperature") for each in (math.nan, math.inf)),
        ({"top_p": 1.1}, "sampling.top_p"),
        ({"top_k": 0}, "sampling.top_k"),
        ({"repetition_penalty": 1e30}, "sampling.repetition_penalty must be from 1e-6 to 1e6"),
        ({"stop": ["x", "y" * (MAX_STOP_CHARACTERS + 1)]}, r"sampling.stop\[1\]"),
        ({"stop_token_ids": [1, VOCABULARY_SIZE]}, r"sampling.stop_token_ids\[1\]"),
    ],
)
async def test_invalid_sampling_is_rejected(fields, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        await parsed(text="x", sampling=Sampling(**fields))


class Counted(RouterTokenizer):
    """Counts the calls that encode words or a prompt, or decode one."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer().to_str().encode())
        self.num_words = self.num_prompts = self.num_decoded = 0

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.num_words += 1
        return await super().encode_all(texts)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_prompts += 1
        return await super().encode(text, add_special_tokens=add_special_tokens)

    async def decode_any(self, token_ids: list[int]) -> str:
        self.num_decoded += 1
        return await super().decode_any(token_ids)


def answers(num: int = 128, **fields: Any) -> Sequence[GenerateParams]:
    """Return the generations of one request over HTTP."""
    given = GenerationFields(n=num, seed=5, **fields)
    return choices(given, [PromptIds([5, 6, 7])], samplings(given, 8), echo=True)


async def test_all_generations_of_one_request_are_validated_once(monkeypatch):
    """They differ only in id and seed. 64 KB of bad_words with n = 128 took 11.9 s."""
    checked, compiled = [], []
    check, compile_ = validation.sampling.check, validation.Automaton
    monkeypatch.setattr(validation.sampling, "check", lambda p: (checked.append(p), check(p)))
    monkeypatch.setattr(validation, "Automaton", lambda t: (compiled.append(t), compile_(t))[1])
    tokenizer = Counted()
    shared = PromptEncoder(tokenizer, None, LIMITS, ModelFormat())
    wanted = answers(bad_words=["ab", "cd"], stop_regex=["a+b"], logit_bias={5: 1.0}, regex="a")
    jobs = await asyncio.gather(
        *(parse(each, f"r-{n}", shared, LIMITS, CLIENT) for n, each in enumerate(wanted))
    )
    assert (len(checked), len(compiled)) == (2, 1)  # once more with the words
    assert (tokenizer.num_words, tokenizer.num_decoded) == (1, 1)
    assert [job.spec.request_id for job in jobs] == [f"r-{n}" for n in range(128)]
    assert [job.spec.sampling.seed for job in jobs] == [each.sampling.seed for each in wanted]
    assert len({job.spec.sampling.seed for job in jobs}) == 128
    first = jobs[0]
    for job in jobs:  # nothing is copied unnecessarily
        assert job.spec.token_ids is first.spec.token_ids and job.stops is first.stops
        assert job.spec.sampling.bad_word_ids is first.spec.sampling.bad_word_ids
        assert job.spec.sampling.guide is first.spec.sampling.guide and job.echo is first.echo


@pytest.mark.parametrize(
    "fields, sentence, num_words",
    [
        ({"bad_words": ["x" * 1024] * 64}, "bad_words has 65536 characters, 16384 allowed", 0),
        ({"bad_words": ["x y " * 256]}, "tokens in a word", 1),
        ({"stop_regex": ["("]}, r"sampling.stop_regex\[0\]: it is not a regular", 0),
        ({"stop_regex": ["ab", "x" * 1025]}, r"sampling.stop_regex\[1\] has 1025", 0),
    ],
    ids=["characters", "tokens", "expression", "length"],
)
async def test_a_rejection_costs_no_more_for_many_generations(fields, sentence, num_words):
    tokenizer = Counted()
    shared = PromptEncoder(tokenizer, None, LIMITS, ModelFormat())
    asked = (parse(each, "r", shared, LIMITS, CLIENT) for each in answers(**fields))
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(error) for error in errors} == {InvalidRequest}
    assert re.search(sentence, str(errors[-1]))
    assert tokenizer.num_words == num_words


async def test_a_rejected_prompt_is_encoded_once_for_many_generations():
    tokenizer = Counted()
    shared = PromptEncoder(tokenizer, None, LIMITS, ModelFormat())
    given = GenerationFields(n=128)
    wanted = choices(given, [TextPrompt("xy " * 40)], samplings(given, 8))
    asked = (parse(each, "r", shared, LIMITS, CLIENT) for each in wanted)
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(error) for error in errors} == {InvalidRequest}
    assert tokenizer.num_prompts == 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("bad_words", ["x"] * 65),
        ("stop", ["x"] * 17),
        ("stop_regex", ["x"] * 17),
        ("stop_token_ids", [5] * 17),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("allowed_token_ids", [5] * 4097),
    ],
)
def test_too_long_a_list_is_not_copied_for_each_generation(field, value):
    with pytest.raises(InvalidRequest, match=f"sampling.{field} has {len(value)} "):
        answers(**{field: value})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_timeout_is_rejected(timeout_s):
    with pytest.raises(InvalidRequest, match="timeout_s"):
        budget_s(from_request(GenerateRequest(timeout_s=timeout_s)).timeout_s, 600.0)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"stop_token_ids": [5] * 17}, "sampling.stop_token_ids has 17 ids, 16 allowed"),
        ({"stop": ["x"] * 17}, "sampling.stop has 17 strings, 16 allowed"),
    ],
)
def test_too_long_lists_are_rejected_before_they_are_copied(fields, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        from_request(GenerateRequest(text="x", sampling=Sampling(**fields)))


def test_the_timeout_is_the_shorter_of_the_clients_and_the_routers():
    assert budget_s(from_request(GenerateRequest()).timeout_s, 600.0) == 600.0
    assert budget_s(5.0, 600.0) == 5.0
    assert budget_s(900.0, 600.0) == 600.0


@pytest.mark.parametrize("asked, expected", [(None, 44), (10, 10), (44, 44)])
async def test_the_default_of_max_tokens_is_the_remaining_context(asked, expected):
    sampling = await parsed(token_ids=tokens(*[5] * 20), sampling=Sampling(max_tokens=asked))
    assert sampling.max_tokens == expected


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
async def test_too_large_max_tokens_of_a_client_is_rejected(field):
    sentence = (
        rf"^sampling\.{field} is too large: 45\. This model's maximum context length is 64 tokens "
        r"and your request has 20 input tokens \(45 > 64 - 20\)\.$"
    )
    with pytest.raises(InvalidRequest, match=sentence):
        await parsed(token_ids=tokens(*[5] * 20), sampling=Sampling(**{field: 45}))


async def test_the_longest_prompt_leaves_room_for_one_token():
    longest = tokens(*[5] * (CONTEXT_LENGTH - 1))
    assert (await parsed(token_ids=longest)).max_tokens == 1


async def test_an_unset_seed_is_random_and_a_set_one_is_kept():
    assert len({(await parsed(text="x")).seed for _ in range(8)}) == 8
    assert (await parsed(text="x", sampling=Sampling(seed=0))).seed == 0


async def test_a_tokenizer_saved_with_truncation_still_encodes_everything():
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    subject = RouterTokenizer(tokenizer.to_str().encode())
    ids = await subject.encode("the quick brown fox jumps", add_special_tokens=False)
    assert subject.decode(ids) == "the quick brown fox jumps"
    assert len(ids) < 32


def test_an_invalid_tokenizer_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        RouterTokenizer(b"{}")


@pytest.mark.parametrize("num_characters", [1, 1023, 1024, 1025, 5000])
async def test_texts_of_any_length_are_encoded_alike(num_characters):
    tokenizer = byte_level_tokenizer()
    text = ("the quick brown fox jumps over the lazy dog; größer " * 100)[:num_characters]
    subject = RouterTokenizer(tokenizer.to_str().encode())
    for special in (True, False):
        expected = tokenizer.encode(text, add_special_tokens=special).ids
        assert await subject.encode(text, add_special_tokens=special) == expected


def test_a_router_sends_no_longer_timeout_than_nodes_accept():
    assert RouterConfig(model="m", request_timeout_s=MAX_BUDGET_S).request_timeout_s == MAX_BUDGET_S
    for too_long in (MAX_BUDGET_S + 1, math.inf):
        with pytest.raises(ValueError, match="request_timeout_s"):
            RouterConfig(model="m", request_timeout_s=too_long)

"""Prompts that cannot fit the context are rejected before any work."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from api.auth.client import by_address
from api.dialect.fields import GenerationFields, choices, samplings
from api.parsers.model_format import ModelFormat
from api.requests.generate_params import (
    ChatPrompt,
    ChatTurn,
    ModelLimits,
    TextPrompt,
    TokenIdsPrompt,
)
from api.requests.prompts import PromptEncoder
from api.requests.validation import parse
from api.text.chat_template import ChatTemplate
from api.text.tokenizer import RouterTokenizer, num_bytes
from common.errors import InvalidRequest
from tests.api.models import byte_level_tokenizer, sentencepiece_like_tokenizer

CONTEXT = 1000
CLIENT = by_address("192.0.2.1")
LIMITS = ModelLimits(CONTEXT, 320, longest_token_bytes=10)
WORDS = "the quick brown fox jumps over the lazy dog; größer "
KINDS = {
    "words": WORDS,
    "spaces": " ",
    "one word": "supercalifragilistic",
    "emoji": "\U0001f600\U0001f468\u200d\U0001f469",
    "lines": "\n\n\t  {\n",
}


class Encoder:
    """Counts the texts that it encodes."""

    def __init__(self, exceeds: bool = False) -> None:
        self.num_encoded = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._exceeds = exceeds

    def token_of(self, name: str) -> None:
        return None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_encoded += 1
        await self.may_go_on.wait()
        return [5] * 7

    async def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        return self._exceeds


class Untouchable(Sequence[int]):
    """Has a length, and no content that may be accessed."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        raise AssertionError("a token was looked at")


def prompts(encoder: Encoder, template: str = "") -> PromptEncoder:
    return PromptEncoder(
        cast(RouterTokenizer, encoder), ChatTemplate(template, {}), LIMITS, ModelFormat()
    )


@pytest.mark.parametrize("character, num", [("x", 10_001), ("ö", 5_001), ("\U0001f600", 2_501)])
async def test_a_text_of_too_many_bytes_is_not_encoded(character, num):
    encoder = Encoder()
    expected = rf"text has {num_bytes(character * num)} bytes of text; .* accepts at most 10000"
    with pytest.raises(InvalidRequest, match=expected):
        await prompts(encoder).checked(TextPrompt(character * num), CLIENT)
    assert encoder.num_encoded == 0
    assert len(await prompts(encoder).checked(TextPrompt(character * (num - 1)), CLIENT)) == 7


async def test_a_text_that_is_too_long_by_its_first_pieces_is_not_encoded_completely():
    encoder = Encoder(exceeds=True)
    with pytest.raises(InvalidRequest, match=f"text has more than {CONTEXT} tokens"):
        await prompts(encoder).checked(TextPrompt("x" * (4 * CONTEXT + 1)), CLIENT)
    assert encoder.num_encoded == 0


async def test_rendering_stops_where_the_prompt_is_too_long():
    template = (
        "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
        "{{ raise_exception('rendered to the end') }}"
    )
    encoder = Encoder()
    with pytest.raises(InvalidRequest, match="more than 10000 characters"):
        await prompts(encoder, template).checked(ChatPrompt([ChatTurn("user", "x" * 500)]), CLIENT)
    assert encoder.num_encoded == 0


async def test_too_many_token_ids_are_rejected_without_reading_them():
    with pytest.raises(InvalidRequest, match="token_ids has 10000000 tokens"):
        await prompts(Encoder()).checked(TokenIdsPrompt(Untouchable()), CLIENT)


async def test_a_cancelled_choice_leaves_the_encoding_to_another():
    encoder = Encoder()
    encoder.may_go_on.clear()
    given = GenerationFields(n=2)
    wanted = choices(given, [TextPrompt("x")], samplings(given, 8))
    parsing = (parse(each, "r", prompts(encoder), LIMITS, CLIENT) for each in wanted)
    first, second = map(asyncio.create_task, parsing)
    await asyncio.sleep(0)
    first.cancel()
    encoder.may_go_on.set()
    assert list((await second).spec.tokens) == [5] * 7
    assert first.cancelled()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_like_tokenizer])
async def test_encoding_in_pieces_never_rejects_a_text_that_fits(make, kind):
    tokenizer = make()  # type: ignore[operator]
    subject = RouterTokenizer(tokenizer.to_str().encode())
    text = (KINDS[kind] * 140_000)[:140_000]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert not await subject.surely_exceeds(text, num_tokens)
    assert await subject.surely_exceeds(text, num_tokens - 1000)


def test_a_token_has_at_most_as_many_bytes_as_its_text():
    byte_level, pieces = byte_level_tokenizer(), sentencepiece_like_tokenizer()
    byte_level.add_tokens(["<" + "ö" * 30 + ">"])
    pieces.add_tokens(["<" + "ö" * 30 + ">"])
    assert RouterTokenizer(pieces.to_str().encode()).longest_token_bytes == 62
    assert RouterTokenizer(byte_level.to_str().encode()).longest_token_bytes == 62


async def test_a_short_text_does_not_wait_behind_long_ones():
    subject = RouterTokenizer(byte_level_tokenizer().to_str().encode(), cores=1)
    slow = SlowWithLong(subject._tokenizer)
    subject._tokenizer = slow  # type: ignore[assignment]
    encodings = [
        asyncio.create_task(subject.encode(WORDS * 6000, add_special_tokens=False))
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    await subject.encode((WORDS * 40)[:1400], add_special_tokens=False)
    assert not any(encoding.done() for encoding in encodings)
    slow.may_go_on.set()
    await asyncio.gather(*encodings)
    assert slow.num_long == 4


class SlowWithLong:
    """A tokenizer whose time for a long text the test controls."""

    def __init__(self, inner: Any) -> None:
        self.may_go_on = asyncio.Event()
        self.num_long = 0
        self._inner = inner

    def async_encode_batch_fast(self, texts: list[str], **how: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._encoded(texts, how))

    async def _encoded(self, texts: list[str], how: dict[str, Any]) -> Any:
        if len(texts[0]) > 10_000:
            self.num_long += 1
            await self.may_go_on.wait()
        return await self._inner.async_encode_batch_fast(texts, **how)


async def test_many_tokens_are_decoded_like_few():
    tokenizer = byte_level_tokenizer()
    subject = RouterTokenizer(tokenizer.to_str().encode())
    ids = tokenizer.encode(WORDS * 200, add_special_tokens=False).ids
    assert await subject.decode_any(ids) == subject.decode(ids) == WORDS * 200
    assert await subject.decode_any(ids[:5]) == subject.decode(ids[:5])


async def test_names_of_speakers_count_towards_the_limit_of_a_prompt():
    named = ChatPrompt([ChatTurn("user", "hi", "x" * LIMITS.text_bytes)])
    with pytest.raises(InvalidRequest, match="bytes of text"):
        await prompts(Encoder(), "{{ messages[0].content }}").encode(named, CLIENT)

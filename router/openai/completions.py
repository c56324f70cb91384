"""/v1/completions: a prompt, or a list of them, as text or as token ids."""

from collections.abc import Iterator, Sequence
from typing import cast

import msgspec

from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from router.openai.asked import Asked
from router.openai.bodies import BodyReader
from router.openai.fields import (
    MAX_CHOICES,
    UNSUPPORTED,
    Fields,
    TokenId,
    check_multiplied,
    samplings,
)
from router.openai.problems import Refusal

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFields(Fields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]


class Choice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class Completions:
    """The dialect of this endpoint."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self) -> None:
        self._reader = BodyReader(
            CompletionFields,
            {
                **UNSUPPORTED,
                "suffix": ("",),
                "best_of": (1,),
                "logprobs": (),
                "prompt_embeds": (),
                "add_special_tokens": (True,),
            },
        )
        self.field_names = self._reader.names

    def read(self, body: bytes) -> Asked:
        fields = self._reader.read(body)
        check_multiplied(fields, body)
        max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        per_prompt = samplings(fields, max_tokens)
        prompts = _prompts(fields.prompt)
        if len(prompts) * len(per_prompt) > MAX_CHOICES:
            raise Refusal(
                400,
                f"prompt: {len(prompts)} prompts with n = {len(per_prompt)} are more than "
                f"{MAX_CHOICES} choices",
                param="prompt",
            )
        return Asked.from_fields(fields, list(_requests(prompts, per_prompt)), len(per_prompt))

    def choice(self, index: int, text: str, finish_reason: str) -> Choice:
        return Choice(index, text, finish_reason)

    def chunk(self, index: int, text: str, finish_reason: str | None, first: bool) -> Choice:
        return Choice(index, text, finish_reason)


def _prompts(
    prompt: str | list[str | TokenId | list[TokenId]],
) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    match {type(item) for item in prompt}:
        case kinds if not kinds:
            raise Refusal(400, "prompt is empty", param="prompt")
        case kinds if kinds == {int}:
            return [cast(list[int], prompt)]
        case kinds if len(kinds) == 1:
            return cast(list[str | list[int]], prompt)
        case _:
            raise Refusal(400, "prompt mixes text, token ids and lists of them", param="prompt")


def _requests(
    prompts: Sequence[str | list[int]], per_prompt: Sequence[Sampling]
) -> Iterator[GenerateRequest]:
    for prompt in prompts:
        for sampling in per_prompt:
            if isinstance(prompt, str):
                yield GenerateRequest(text=prompt, sampling=sampling)
            else:
                yield GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)

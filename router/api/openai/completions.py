"""/v1/completions: a prompt, or a list of them, as text or as token ids."""

from collections.abc import Sequence
from typing import cast

import msgspec

from router.api.openai.asked import Asked
from router.api.openai.bodies import BodyReader
from router.api.openai.fields import Fields, TokenId, check_multiplied, choices, samplings
from router.api.openai.harmless import OF_COMPLETIONS
from router.api.openai.problems import Refusal
from router.requests.wanted import Text, TokenIds
from router.text.limits import MAX_CHOICES

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

    def __init__(self, *, ignore_unknown: bool) -> None:
        """
        Args:
            ignore_unknown: as of BodyReader.
        """
        self._reader = BodyReader(CompletionFields, OF_COMPLETIONS, ignore_unknown=ignore_unknown)
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
        wanted = choices(fields, prompts, per_prompt)
        return Asked.from_fields(fields, wanted, len(per_prompt))

    def choice(self, index: int, text: str, finish_reason: str) -> Choice:
        return Choice(index, text, finish_reason)

    def chunk(self, index: int, text: str, finish_reason: str | None, first: bool) -> Choice:
        return Choice(index, text, finish_reason)


def _prompts(prompt: str | list[str | TokenId | list[TokenId]]) -> Sequence[Text | TokenIds]:
    if isinstance(prompt, str):
        return [Text(prompt)]
    match {type(item) for item in prompt}:
        case kinds if not kinds:
            raise Refusal(400, "prompt is empty", param="prompt")
        case kinds if kinds == {int}:
            return [TokenIds(cast(list[int], prompt))]
        case kinds if kinds == {str}:
            return [Text(text) for text in cast(list[str], prompt)]
        case kinds if len(kinds) == 1:
            return [TokenIds(ids) for ids in cast(list[list[int]], prompt)]
        case _:
            raise Refusal(400, "prompt mixes text, token ids and lists of them", param="prompt")

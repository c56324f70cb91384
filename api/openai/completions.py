"""/v1/completions: a prompt or a list of prompts, as text or as token ids."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from api.dialect.fields import (
    GenerationFields,
    TextOrTokens,
    check_multiplied,
    choices,
    form_field,
    includes_usage,
    prompts_of,
    samplings,
    session_of,
)
from api.dialect.generation_endpoint import Dialect, EndpointCall
from api.dialect.ignored_fields import OF_COMPLETIONS
from api.dialect.problems import invalid
from api.openai.replies import (
    ChoiceCollector,
    ChoiceEnd,
    ReturnedStates,
    TextLogprobs,
    TextTokens,
    TokenIds,
    generated_ids,
    prompt_ids,
)
from api.parsers.model_format import ModelFormat
from api.requests.answer import FinalChunk, OutputChunk, TokenReport
from api.requests.generate_params import MAX_CHOICES
from common.requests.sampling import MAX_LOGPROBS

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionFields(GenerationFields, kw_only=True):
    prompt: TextOrTokens
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    prompt_logprobs_start: Annotated[int, msgspec.Meta(ge=0)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None


class CompletionChoice(ChoiceEnd):
    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    prompt_token_ids: TokenIds = msgspec.UNSET


class CompletionResponseWriter:
    """Writes one choice of a text completion.

    Args:
        returns_logprobs: log-probabilities are returned, if there are any.
        returns_ids: token ids are returned.
    """

    def __init__(
        self, index: int, *, returns_logprobs: bool = True, returns_ids: bool = False
    ) -> None:
        self._index = index
        self._returns_logprobs = returns_logprobs
        self._returns_ids = returns_ids
        self._begun = False
        self._tokens = TextTokens()
        self._states = ReturnedStates()

    def chunk(self, piece: OutputChunk | FinalChunk) -> CompletionChoice | None:
        if isinstance(piece, FinalChunk):
            return self.choice([piece], piece)
        chunk = None  # the text ends within a character
        if piece.text or piece.tokens or self._returns_ids or not self._begun:
            chunk = self._choice([piece], None)
        self._states.add(piece)
        self._begun = True
        return chunk

    def choice(self, pieces: Sequence[OutputChunk], last: FinalChunk) -> CompletionChoice:
        choice = self._choice(pieces, last.finish_reason)
        for piece in pieces:
            self._states.add(piece)
        self._states.end(choice, last)
        return choice

    def _choice(self, pieces: Sequence[OutputChunk], finish_reason: str | None) -> CompletionChoice:
        logprobs = self._logprobs(pieces)
        choice = CompletionChoice(self._index, _text(pieces), finish_reason, logprobs)
        if self._returns_ids:
            choice.token_ids = generated_ids(pieces)
            if pieces[0].prompt_token_ids:
                choice.prompt_token_ids = prompt_ids(pieces[0])
        return choice

    def _logprobs(self, pieces: Sequence[OutputChunk]) -> TextLogprobs | None:
        if not self._returns_logprobs:
            return None
        tokens: list[TokenReport] = []
        for piece in pieces:
            tokens += piece.prompt.tokens if piece.prompt else ()
            tokens += piece.tokens
        return self._tokens.logprobs(tokens, pieces[0].prompt)


def _text(pieces: Sequence[OutputChunk]) -> str:
    """Return the text, with the prompt if it is echoed."""
    return "".join((piece.prompt.text if piece.prompt else "") + piece.text for piece in pieces)


def _call(
    fields: CompletionFields, num_bytes: int, model_format: ModelFormat, ignored: list[str]
) -> EndpointCall:
    best_of = _best_of(fields)
    check_multiplied(fields, num_bytes, best_of)
    max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    echo = bool(fields.echo)
    silent = echo and max_tokens == 0
    logprobs = -1 if fields.logprobs is None else fields.logprobs
    per_prompt = samplings(
        fields,
        1 if silent else max_tokens,
        logprobs=max(logprobs, 0) if best_of > 1 else logprobs,
        prompt_logprobs=logprobs if echo else -1,
        prompt_logprobs_start=fields.prompt_logprobs_start or 0,
        best_of=best_of,
    )
    prompts = prompts_of("prompt", fields.prompt)
    if len(prompts) * len(per_prompt) > MAX_CHOICES:
        count = f"{'best_of' if best_of > 1 else 'n'} = {len(per_prompt)}"
        problem = f": {len(prompts)} prompts with {count} are more than {MAX_CHOICES} choices"
        raise invalid("prompt", problem)
    requests = choices(
        fields,
        prompts,
        per_prompt,
        max_tokens_field="" if fields.max_tokens is None else "max_tokens",
        echo=echo,
        silent=silent,
    )
    collector = ChoiceCollector(
        whole_object="text_completion",
        chunk_object="text_completion",
        num=len(requests),
        num_per_prompt=len(per_prompt),
        stream=bool(fields.stream),
        include_usage=includes_usage(fields),
        writer=partial(
            CompletionResponseWriter,
            returns_logprobs=logprobs >= 0,
            returns_ids=bool(fields.return_token_ids),
        ),
        num_kept=fields.n or 1,
    )
    return EndpointCall(
        fields.model,
        requests,
        collector.content,
        collector.stream,
        session_of(fields),
        fields.lora_path,
        form_field(fields),
    )


COMPLETIONS = Dialect("cmpl-", CompletionFields, OF_COMPLETIONS, _call)


def _best_of(fields: CompletionFields) -> int:
    """Return the number of responses to a prompt from which the best are selected. 1: no selection.

    Raises:
        ApiError: it is less than n, or the response is streamed, before the best are known.
    """
    best_of, n = fields.best_of or 1, fields.n or 1
    if best_of in (1, n):
        return 1
    if best_of < n:
        raise invalid("best_of", f"= {best_of} is less than n = {n}")
    if fields.stream:
        raise invalid("best_of", ": not supported with stream")
    return best_of

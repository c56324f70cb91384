"""Turns what is wanted into a checked job, or says which field is wrong.

Knows the model's limits and its tokenizer; knows nothing of nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from common import sampling
from common.errors import InvalidRequest
from common.namespace import SHARED, Namespace
from common.sampling import SamplingParams
from router import namespaces
from router.chat_template import ChatTemplate
from router.tokenizer import RouterTokenizer
from router.wanted import Messages, Nothing, Prompt, Text, TokenIds, Wanted

# Of one conversation. A template takes 3 us for each, and meanwhile no other request moves on.
MAX_MESSAGES = 4096
MAX_STOP_CHARACTERS = 1024
MAX_REQUEST_ID_CHARACTERS = 256
MAX_SESSION_ID_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows."""

    context_length: int  # tokens of prompt and answer together
    vocabulary_size: int


class Job(msgspec.Struct, frozen=True):
    """A request in tokens, ready for a decode node."""

    request_id: str
    token_ids: Sequence[int]  # the prompt, then tokens already generated
    sampling: SamplingParams
    stop: Sequence[str]
    num_generated: int = 0  # of token_ids
    session: str = ""
    namespace: Namespace = SHARED  # of prefix caches


class Prompts:
    """Makes token ids of the three forms a prompt can have."""

    def __init__(self, tokenizer: RouterTokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Raises InvalidRequest when there is no prompt or the model has no such form."""
        match prompt:
            case Text():
                return await self._tokenizer.encode(prompt.text, add_special_tokens=True)
            case TokenIds():
                return prompt.token_ids
            case Messages():
                text = self._render(prompt)
                return await self._tokenizer.encode(text, add_special_tokens=False)
            case Nothing():
                raise InvalidRequest(f"prompt is missing: set one of {', '.join(prompt.one_of)}")

    def _render(self, messages: Messages) -> str:
        if self._chat_template is None:
            raise InvalidRequest("messages: this model has no chat template; send text instead")
        if not messages.turns:
            raise InvalidRequest("messages must have at least one message")
        if len(messages.turns) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has {len(messages.turns)} messages, {MAX_MESSAGES} allowed"
            )
        turns = [{"role": turn.role, "content": turn.content} for turn in messages.turns]
        for number, turn in enumerate(turns):
            if not turn["role"]:
                raise InvalidRequest(f"messages[{number}].role is empty")
        return self._chat_template.render(turns)


async def parse(wanted: Wanted, request_id: str, prompts: Prompts, limits: Limits) -> Job:
    """Checks prompt and sampling.

    Raises:
        InvalidRequest: with a sentence that names the field.
    """
    # Checked before the prompt is encoded: a wrong number costs no tokenizer time.
    params = wanted.sampling
    sampling.check(params)
    if wanted.stop:
        check_stop(wanted.stop)
    check_session_id(wanted.session_id)
    namespace = namespaces.decide(wanted)
    check_vocabulary(params.stop_token_ids, limits, "sampling.stop_token_ids")
    token_ids = await prompts.encode(wanted.prompt)
    check_prompt(token_ids, limits, wanted.prompt.field)
    context_left = limits.context_length - len(token_ids)
    if params.max_tokens > context_left:
        params = replace(params, max_tokens=context_left)
    return Job(
        request_id=request_id,
        token_ids=token_ids,
        sampling=params,
        stop=wanted.stop,
        session=wanted.session_id,
        namespace=namespace,
    )


def check_prompt(token_ids: Sequence[int], limits: Limits, field: str | None) -> None:
    """Raises InvalidRequest unless the prompt has tokens, all known, and leaves room for one."""
    if not token_ids:
        raise InvalidRequest(f"{field} is empty: a prompt has at least one token")
    if len(token_ids) >= limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context of {limits.context_length} tokens "
            f"takes prompts of at most {limits.context_length - 1}"
        )
    check_vocabulary(token_ids, limits, field)


def check_context(token_ids: Sequence[int], limits: Limits, field: str) -> None:
    """Raises InvalidRequest for what no prompt with its answer can be."""
    if len(token_ids) > limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context has {limits.context_length}"
        )
    check_vocabulary(token_ids, limits, field)


def check_vocabulary(token_ids: Sequence[int], limits: Limits, field: str | None) -> None:
    """Raises InvalidRequest naming the first id that the model has no row for."""
    if token_ids and max(token_ids) >= limits.vocabulary_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}] is {token_ids[index]}, out of the vocabulary "
            f"of {limits.vocabulary_size} tokens"
        )


def check_stop(stops: Sequence[str]) -> None:
    """Raises InvalidRequest for stop strings that would cost too much to look for."""
    sampling.check_stop(stops)
    for number, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{number}] has {len(stop)} characters, {MAX_STOP_CHARACTERS} allowed"
            )


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest for a name that logs and metadata could not carry."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters, {MAX_REQUEST_ID_CHARACTERS} allowed"
        )


def check_session_id(session_id: str) -> None:
    """Raises InvalidRequest for a name that is too long to remember."""
    if len(session_id) > MAX_SESSION_ID_CHARACTERS:
        raise InvalidRequest(
            f"session_id has {len(session_id)} characters, {MAX_SESSION_ID_CHARACTERS} allowed"
        )


def budget_s(timeout_s: float | None, longest_s: float) -> float:
    """The request's total budget: its timeout_s, `longest_s` where unset or longer.

    Raises:
        InvalidRequest: timeout_s is not a positive number of seconds.
    """
    if timeout_s is None:
        return longest_s
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout_s must be a positive number, got {timeout_s}")
    return min(timeout_s, longest_s)

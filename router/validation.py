"""Turns a GenerateRequest into a checked job, or says which field is wrong.

Knows the model's limits and its tokenizer; knows nothing of nodes.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from common.errors import InvalidRequest
from common.sampling import SamplingParams, from_proto
from protos import router_pb2
from router.chat_template import ChatTemplate
from router.tokenizer import RouterTokenizer

MAX_STOP_CHARACTERS = 1024
MAX_REQUEST_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows."""

    context_length: int  # tokens of prompt and answer together
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class Job:
    """A request in tokens, ready for a decode node."""

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    stop: tuple[str, ...]


class Prompts:
    """Makes token ids of the three forms a prompt can have."""

    def __init__(self, tokenizer: RouterTokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    async def encode(
        self, prompt: router_pb2.GenerateRequest | router_pb2.TokenizeRequest
    ) -> Sequence[int]:
        """Raises InvalidRequest when no prompt is set or the model has no such form."""
        match prompt.WhichOneof("prompt"):
            case "text":
                return await self._tokenizer.encode(prompt.text, add_special_tokens=True)
            case "messages":
                text = self._render(prompt.messages)
                return await self._tokenizer.encode(text, add_special_tokens=False)
            case "token_ids" if isinstance(prompt, router_pb2.GenerateRequest):
                return list(prompt.token_ids.ids)
            case _:
                fields = [field.name for field in prompt.DESCRIPTOR.oneofs_by_name["prompt"].fields]
                raise InvalidRequest(f"prompt is missing: set one of {', '.join(fields)}")

    def _render(self, messages: router_pb2.ChatMessages) -> str:
        if self._chat_template is None:
            raise InvalidRequest("messages: this model has no chat template; send text instead")
        if not messages.messages:
            raise InvalidRequest("messages must have at least one message")
        turns = [{"role": turn.role, "content": turn.content} for turn in messages.messages]
        for number, turn in enumerate(turns):
            if not turn["role"]:
                raise InvalidRequest(f"messages[{number}].role is empty")
        return self._chat_template.render(turns)


async def parse(
    request: router_pb2.GenerateRequest, request_id: str, prompts: Prompts, limits: Limits
) -> Job:
    """Checks prompt and sampling; draws an unset seed.

    Raises:
        InvalidRequest: with a sentence that names the field.
    """
    # Checked before the prompt is encoded: a wrong number costs no tokenizer time.
    sampling = from_proto(
        request.sampling, max_tokens=limits.context_length, seed=random.getrandbits(64)
    )
    check_stop(request.sampling.stop)
    check_vocabulary(sampling.stop_token_ids, limits, "sampling.stop_token_ids")
    token_ids = await prompts.encode(request)
    check_prompt(token_ids, limits, request.WhichOneof("prompt"))
    context_left = limits.context_length - len(token_ids)
    return Job(
        request_id=request_id,
        token_ids=token_ids,
        sampling=replace(sampling, max_tokens=min(sampling.max_tokens, context_left)),
        stop=tuple(request.sampling.stop),
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


def check_vocabulary(token_ids: Sequence[int], limits: Limits, field: str | None) -> None:
    """Raises InvalidRequest naming the first id that the model has no row for."""
    if token_ids and max(token_ids) >= limits.vocabulary_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}] is {token_ids[index]}, out of the vocabulary "
            f"of {limits.vocabulary_size} tokens"
        )


def check_stop(stops: Sequence[str]) -> None:
    """Raises InvalidRequest for a stop string that would cost too much to look for."""
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


def budget_s(request: router_pb2.GenerateRequest, longest_s: float) -> float:
    """The request's total budget: its timeout_s, `longest_s` where unset or longer.

    Raises:
        InvalidRequest: timeout_s is not a positive number of seconds.
    """
    if not request.HasField("timeout_s"):
        return longest_s
    if not math.isfinite(request.timeout_s) or request.timeout_s <= 0:
        raise InvalidRequest(f"timeout_s must be a positive number, got {request.timeout_s}")
    return min(request.timeout_s, longest_s)

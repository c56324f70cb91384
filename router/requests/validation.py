"""Turns what is wanted into a checked job, or says which field is wrong.

Knows the model's limits; knows nothing of nodes.
"""

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from common.errors import InvalidRequest
from common.requests import sampling
from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.images import Image
from common.requests.namespace import SHARED, Namespace
from common.requests.sampling import SamplingParams
from router.requests import namespaces
from router.requests.prompts import Prompts
from router.requests.wanted import Prompt, Wanted
from router.text import expressions
from router.text.expressions import Expression
from router.text.limits import Limits, check_vocabulary

MAX_STOP_CHARACTERS = 1024
MAX_PROMPT_LOGPROBS = 1 << 18  # 2 MiB on their way through the nodes
MAX_LABEL_CHARACTERS = 256
MAX_SESSION_ID_CHARACTERS = 512


class Job(msgspec.Struct, frozen=True):
    """A request in tokens, ready for a decode node."""

    request_id: str
    token_ids: Sequence[int]  # the prompt, then tokens already generated
    sampling: SamplingParams
    stop: Sequence[str]
    stop_regex: Sequence[Expression] = ()
    num_generated: int = 0  # of token_ids
    engine_deaths: int = 0  # of nodes that had it, see common/requests/trial.py
    session_id: str = ""
    namespace: Namespace = SHARED  # of prefix caches
    adapter: AdapterId = NO_ADAPTER
    shown: frozenset[int] = frozenset()  # special tokens that are not left out of the text
    echo: str | None = None  # the prompt's text, which the answer begins with
    silent: bool = False  # see Wanted
    priority: int = 0
    prediction: Sequence[int] = ()  # what is expected of the answer
    images: Sequence[Image] = ()  # of the prompt

    @property
    def routing_key(self) -> int:
        """By which nodes know its session; 0: it has none."""
        return (xxh3_64_intdigest(self.session_id.encode()) or 1) if self.session_id else 0


async def parse(
    wanted: Wanted,
    request_id: str,
    prompts: Prompts,
    limits: Limits,
    owner: str = "",
    priority: int = 0,
    adapter: AdapterId = NO_ADAPTER,
) -> Job:
    """Checks prompt and sampling.

    Args:
        owner: as of `namespaces.decide`.
        adapter: what `wanted` names.
    Raises:
        InvalidRequest: with a sentence that names the field.
    """
    # Checked before the prompt is encoded: a wrong number costs no tokenizer time.
    params = wanted.sampling
    sampling.check(params)
    if wanted.stop:
        check_stop(wanted.stop)
    stop_regex = stop_expressions(wanted.stop_regex)
    check_session_id(wanted.session_id)
    namespace = namespaces.decide(wanted.cache_salt, owner)
    check_tokens(params, limits)
    check_thinking(params, prompts, wanted.prompt.prompt)
    if wanted.bad_words:
        words = await prompts.words(check_bad_words(wanted.bad_words))
        params = replace(params, bad_word_ids=params.bad_word_ids + words)
        sampling.check(params)
    token_ids = await prompts.checked(wanted.prompt)
    if params.guide is not None or params.thinking_budget >= 0:
        params = replace(params, thought=prompts.thought(wanted.prompt))
    if params.guide is not None:
        params = replace(params, guide=prompts.guide(wanted.prompt, params.guide))
    if wanted.prompt.images and params.prompt_logprobs >= 0:
        raise InvalidRequest("sampling.prompt_logprobs: there are none of a prompt with images")
    check_prompt_logprobs(params, len(token_ids))
    context_left = limits.context_length - len(token_ids)
    if params.max_tokens > context_left:
        params = replace(
            params,
            max_tokens=context_left,
            min_tokens=min(params.min_tokens, context_left),
        )
    return Job(
        request_id=request_id,
        token_ids=token_ids,
        sampling=params,
        stop=wanted.stop,
        stop_regex=stop_regex,
        session_id=wanted.session_id,
        namespace=namespace,
        adapter=adapter,
        shown=wanted.shown,
        echo=await prompts.text_of(wanted.prompt.prompt, token_ids) if wanted.echo else None,
        silent=wanted.silent,
        priority=priority,
        prediction=await prompts.checked(wanted.prediction) if wanted.prediction else (),
        images=wanted.prompt.images,
    )


def check_tokens(params: SamplingParams, limits: Limits) -> None:
    """Raises InvalidRequest for one that the model has no row for."""
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
    }
    for field, tokens in named.items():
        check_vocabulary(tokens, limits, f"sampling.{field}")
    for word in params.bad_word_ids:
        check_vocabulary(word, limits, "sampling.bad_word_ids")


def check_thinking(params: SamplingParams, prompts: Prompts, prompt: Prompt) -> None:
    """Raises InvalidRequest for a budget that nobody could hold an answer to."""
    if params.thinking_budget >= 0 and not prompts.may_think(prompt):
        raise InvalidRequest(
            "sampling.thinking_budget: only messages have it, to a model that marks what it thinks "
            "with one token before and one behind"
        )


def check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Raises InvalidRequest for more numbers than a message should have."""
    num_numbers = num_tokens * (1 + params.prompt_logprobs)
    if num_numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"sampling.prompt_logprobs: {num_numbers} log-probabilities of {num_tokens} tokens, "
            f"{MAX_PROMPT_LOGPROBS} allowed"
        )


def check_bad_words(words: Sequence[str]) -> Sequence[str]:
    """Raises InvalidRequest for words that would cost too much to look for."""
    sampling.check_bad_words(words)
    for number, word in enumerate(words):
        if len(word) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.bad_words[{number}] has {len(word)} characters, "
                f"{MAX_STOP_CHARACTERS} allowed"
            )
    return words


def check_stop(stops: Sequence[str]) -> None:
    """Raises InvalidRequest for stop strings that would cost too much to look for."""
    sampling.check_stop(stops)
    for number, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{number}] has {len(stop)} characters, {MAX_STOP_CHARACTERS} allowed"
            )


def stop_expressions(texts: Sequence[str]) -> Sequence[Expression]:
    """Raises InvalidRequest for what is no expression, or would cost too much to look for."""
    sampling.check_counts((), texts, "stop_regex")
    made: list[Expression] = []
    for number, text in enumerate(texts):
        left = expressions.MAX_NODES - sum(len(each.nodes) for each in made)
        try:
            made.append(expressions.expression(text, left))
        except InvalidRequest as error:
            raise InvalidRequest(f"sampling.stop_regex[{number}]: {error}") from None
    return made


def check_label(label: str) -> None:
    """Raises InvalidRequest for a client's name of a request that logs could not carry."""
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidRequest(
            f"request_id has {len(label)} characters, {MAX_LABEL_CHARACTERS} allowed"
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

"""Validation of request parameters against the model's limits. Errors name the invalid field."""

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from api.auth.client import Client, number_of
from api.requests.generate_params import (
    GenerateParams,
    ModelLimits,
    Prompt,
    SharedPrompt,
    TokenizedRequest,
    all_of,
    check_vocabulary,
)
from api.requests.prompts import PromptEncoder, PromptInputs
from api.text.stops import Automaton, StopRules
from common.errors import InvalidRequest, check_at_most
from common.request import RequestSpec, check_stream_interval
from common.requests import sampling
from common.requests.namespace import (
    NO_ADAPTER,
    SHARED,
    AdapterId,
    Namespace,
    as_bytes,
    namespace_of,
)
from common.requests.sampling import SamplingParams

MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS_CHARACTERS = 16 << 10  # all words of a request: 10 ms, on another thread
MAX_STATE_ANSWERS = 8  # responses to one request that returns states
MAX_PROMPT_LOGPROBS = 1 << 18  # 2 MiB on the way through the nodes
# Tokens that nodes send at a time for a response that is not streamed, as in SGLang.
WHOLE_INTERVAL = 50
MAX_LABEL_CHARACTERS = 256
MAX_SESSION_ID_CHARACTERS = 512


async def parse(
    request: GenerateParams,
    request_id: str,
    prompts: PromptEncoder,
    limits: ModelLimits,
    client: Client,
    priority: int = 0,
    adapter: AdapterId = NO_ADAPTER,
    stream_interval: int = 1,
) -> TokenizedRequest:
    """Check prompt and sampling parameters, and return the tokenized request.

    The responses to one request differ only in their prompts, ids and seeds. Everything else is
    checked, compiled and encoded once, by the first response.

    Args:
        client: the authenticated client.
        adapter: the adapter that `request` names.
        stream_interval: default number of tokens of an event.

    Raises:
        InvalidRequest: the message names the field.
    """
    await request.together.prepare(partial(_prepare, request, prompts, limits, client))
    job = request.prompt.job
    assert job is not None
    spec = replace(
        job.spec,
        request_id=request_id,
        sampling=replace(job.spec.sampling, seed=request.sampling.seed),
        priority=priority,
        adapter=adapter,
        stream_interval=_interval(request, stream_interval),
    )
    return replace(job, spec=spec)


def _interval(request: GenerateParams, default: int) -> int:
    """Return how many tokens nodes send at a time.

    Without streaming, fewer messages cost less. With stop strings, a node sends each token, so that
    it is cancelled at a stop without delay.
    """
    if request.sampling.hidden_states:
        return 1  # states are much larger than the messages that an interval would save
    if not request.whole:
        return request.stream_interval or default
    return 1 if request.stop or request.stop_regex else WHOLE_INTERVAL


async def _prepare(
    request: GenerateParams, prompts: PromptEncoder, limits: ModelLimits, client: Client
) -> None:
    """Check, tokenize and count the prompts of all responses to one request.

    Raises:
        RateLimited, InvalidRequest: see KeyUsage.prompts and check_prompt_logprobs.
    """
    together = request.together
    # Checked before the prompt is encoded, so that an invalid number costs no tokenizer time.
    params = await _checked(request, prompts, limits)
    stops = await stop_rules(request.stop, request.stop_regex)
    base = RequestSpec(
        token_ids=b"",
        sampling=params,
        namespace=decide_namespace(request.cache_salt, client.namespaces_of),
        routing_key=_routing_key(request.session_id),
        client=number_of(client.name),
        client_weight=client.weight,
        prediction=(
            as_bytes(await prompts.checked(request.prediction, client))
            if request.prediction
            else b""
        ),
    )

    async def made(prompt: SharedPrompt) -> TokenizedRequest:
        inputs = await prompts.inputs(prompt, client)
        spec, client_sampling = _with_prompt(base, prompt, inputs, request, prompts, limits)
        text = await prompts.text_of(prompt.prompt, inputs.token_ids) if request.echo else None
        return TokenizedRequest(spec, stops, client_sampling, text)

    jobs = await all_of([partial(made, prompt) for prompt in together.prompts])
    num_tokens = sum(job.spec.num_tokens for job in jobs)
    check_prompt_logprobs(params, num_tokens * (together.num_answers // len(jobs)))
    client.usage.prompts(num_tokens, together.num_answers)
    for prompt, job in zip(together.prompts, jobs, strict=True):
        prompt.job = job


async def _checked(
    request: GenerateParams, prompts: PromptEncoder, limits: ModelLimits
) -> SamplingParams:
    """Return the checked parameters that all responses to one request share."""
    params = request.sampling
    sampling.check(params)
    check_stop(request.stop)
    sampling.check_counts((), request.stop_regex, "stop_regex")
    check_bad_words(request.bad_words)
    session_id = request.session_id
    check_at_most("session_id", len(session_id), "characters", MAX_SESSION_ID_CHARACTERS)
    check_stream_interval(request.stream_interval)
    check_tokens(params, limits)
    check_thinking(params, prompts, request.prompt.prompt)
    if params.returns_states and request.together.num_answers > MAX_STATE_ANSWERS:
        raise InvalidRequest(
            f"{_states_field(params)}: {request.together.num_answers} responses to one request, "
            f"{MAX_STATE_ANSWERS} allowed"
        )
    if request.bad_words:
        words = await prompts.words(request.bad_words)
        params = replace(params, bad_word_ids=params.bad_word_ids + words)
        sampling.check(params)
    return params


def _with_prompt(
    base: RequestSpec,
    prompt: SharedPrompt,
    inputs: PromptInputs,
    request: GenerateParams,
    prompts: PromptEncoder,
    limits: ModelLimits,
) -> tuple[RequestSpec, SamplingParams]:
    """Return the request for any response to this prompt, and the client's parameters of it."""
    params, num_tokens = base.sampling, len(inputs.token_ids)
    if params.guide is not None or params.thinking_budget >= 0:
        params = replace(params, thought=prompts.thought(prompt))
    if params.guide is not None:
        params = replace(params, guide=prompts.guide(prompt, params.guide))
    if inputs.images or inputs.embeddings is not None:
        _check_ids_unused(params, "images" if inputs.images else "input_embeddings")
    client_sampling = fit_context(
        params, request.max_tokens_field, num_tokens, limits.context_length
    )
    check_prompt_logprobs_start(client_sampling, num_tokens)
    spec = replace(
        base,
        token_ids=as_bytes(inputs.token_ids),
        sampling=with_states(client_sampling),
        images=tuple(inputs.images),
        input_embeddings=inputs.embeddings,
    )
    return spec, client_sampling


def _routing_key(session_id: str) -> int:
    """Return the routing key of a session, or 0."""
    return (xxh3_64_intdigest(session_id.encode()) or 1) if session_id else 0


def fit_context(
    params: SamplingParams, field: str, num_prompt_tokens: int, context_length: int
) -> SamplingParams:
    """Reduce a default max_tokens to the rest of the context.

    Args:
        field: name of the client's max_tokens field, "" for a default.

    Raises:
        InvalidRequest: max_tokens or min_tokens from the client does not fit.
    """
    context_left = context_length - num_prompt_tokens
    lengths = {field: params.max_tokens, "sampling.min_tokens": params.min_tokens}
    for name, num_tokens in lengths.items():
        if name and num_tokens > context_left:
            raise InvalidRequest(
                f"{name} is too large: {num_tokens}. This model's maximum context length is "
                f"{context_length} tokens and your request has {num_prompt_tokens} input tokens "
                f"({num_tokens} > {context_length} - {num_prompt_tokens})."
            )
    if params.max_tokens <= context_left:
        return params
    return replace(params, max_tokens=context_left)


def check_tokens(params: SamplingParams, limits: ModelLimits) -> None:
    """Raise InvalidRequest for a token that is outside the vocabulary."""
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
    }
    for field, tokens in named.items():
        check_vocabulary(tokens, limits, f"sampling.{field}")
    for word in params.bad_word_ids:
        check_vocabulary(word, limits, "sampling.bad_word_ids")


def _check_ids_unused(params: SamplingParams, inputs: str) -> None:
    """Raise InvalidRequest for parameters that need the token ids of the prompt.

    Args:
        inputs: description of the prompt's inputs that have no ids, for errors.
    """
    if params.prompt_logprobs >= 0:
        raise InvalidRequest(f"sampling.prompt_logprobs is not supported for prompts with {inputs}")
    if params.returns_states:
        raise InvalidRequest(f"{_states_field(params)} is not supported for prompts with {inputs}")


def _states_field(params: SamplingParams) -> str:
    """Return the name of the field that requests hidden states or routed experts."""
    return "return_hidden_states" if params.hidden_states else "return_routed_experts"


def with_states(params: SamplingParams) -> SamplingParams:
    """Return the parameters for nodes, which send states and experts with log-probabilities."""
    if not params.returns_states:
        return params
    logprobs, prompt_logprobs = max(params.logprobs, 0), max(params.prompt_logprobs, 0)
    return replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def check_thinking(params: SamplingParams, prompts: PromptEncoder, prompt: Prompt) -> None:
    """Raise InvalidRequest for a thinking budget that nodes cannot enforce."""
    if params.thinking_budget >= 0 and not prompts.may_think(prompt):
        raise InvalidRequest(
            "sampling.thinking_budget: needs messages, and a model that marks its reasoning with "
            "one token before and one after it"
        )


def check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Check the number of prompt log-probabilities.

    Args:
        num_tokens: total tokens of the prompts of all responses to one request.

    Raises:
        InvalidRequest: there are too many.
    """
    num_numbers = num_tokens * (1 + params.prompt_logprobs)
    if num_numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"sampling.prompt_logprobs: {num_numbers} log-probabilities of {num_tokens} tokens, "
            f"{MAX_PROMPT_LOGPROBS} allowed"
        )


def check_prompt_logprobs_start(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise InvalidRequest if the first prompt token with a log-probability does not exist."""
    start = params.prompt_logprobs_start
    if start and params.prompt_logprobs < 0:
        raise InvalidRequest(
            "sampling.prompt_logprobs_start: no log-probabilities of the prompt are requested"
        )
    if start and start >= num_prompt_tokens:
        raise InvalidRequest(
            f"sampling.prompt_logprobs_start: {start} is not below the {num_prompt_tokens} tokens "
            "of the prompt"
        )


def check_bad_words(words: Sequence[str]) -> None:
    """Raise InvalidRequest for words that would cost too much to encode."""
    sampling.check_bad_words(words)
    _check_characters("bad_words", words)
    total = sum(map(len, words))
    check_at_most("sampling.bad_words", total, "characters", MAX_BAD_WORDS_CHARACTERS)


def check_stop(stops: Sequence[str]) -> None:
    """Raise InvalidRequest for stop strings that would cost too much to search for."""
    sampling.check_stop(stops)
    _check_characters("stop", stops)


def _check_characters(field: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        where = f"sampling.{field}[{number}]"
        check_at_most(where, len(text), "characters", MAX_STOP_CHARACTERS)


async def stop_rules(strings: Sequence[str], texts: Sequence[str]) -> StopRules | None:
    """Compile the stop strings and expressions of a response. Return None if it has none.

    Expressions take milliseconds, on another thread.

    Raises:
        InvalidRequest: an expression is invalid, or all of them cost too much to search for.
    """
    if not texts:
        return StopRules(strings) if strings else None
    try:
        return StopRules(strings, await asyncio.to_thread(Automaton, texts))
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.stop_regex{error}") from None


def check_label(label: str) -> None:
    """Raise InvalidRequest for a label that is too long for logs."""
    check_at_most("request_id", len(label), "characters", MAX_LABEL_CHARACTERS)


def budget_s(timeout_s: float | None, longest_s: float) -> float:
    """Return the request's total budget in seconds: timeout_s, but at most `longest_s`.

    Raises:
        InvalidRequest: timeout_s is not a positive number of seconds.
    """
    if timeout_s is None:
        return longest_s
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout_s must be a positive number, got {timeout_s}")
    return min(timeout_s, longest_s)


MAX_SALT_CHARACTERS = 512


def decide_namespace(salt: str | None, owner: str) -> Namespace:
    """Return the namespace of a salt. Requests of one owner without a salt share a namespace.

    Args:
        owner: owner of the namespaces, which the salts of other owners cannot reach. "": shared by
            all clients.

    Raises:
        InvalidRequest: the salt is too long, or empty, which would isolate nothing.
    """
    if salt == "":
        raise InvalidRequest("cache_salt is empty: omit it to share the cache")
    check_at_most("cache_salt", len(salt or ""), "characters", MAX_SALT_CHARACTERS)
    if salt is None and not owner:
        return SHARED
    return namespace_of(salt or "", owner)

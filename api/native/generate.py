"""SGLang's native API: /generate, and /tokenize and /detokenize, which vLLM also has."""

import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import msgspec

from api.auth.client import Client
from api.dialect.bodies import Ignored, Nothing
from api.dialect.fields import (
    GenerationFields,
    Int32,
    ModelName,
    StreamInterval,
    TokenId,
    check_multiplied,
    choices,
    form_field,
    samplings,
)
from api.dialect.generation_endpoint import (
    DONE,
    Dialect,
    EndpointCall,
    ResponseContent,
    encode,
)
from api.dialect.ignored_fields import OF_NATIVE
from api.dialect.messages import MessageList, ToolList, conversation, shown
from api.dialect.problems import ApiError, invalid
from api.native.logprobs import CollectedLogprobs, LogprobFields, LogprobOptions
from api.parsers.model_format import ModelFormat
from api.requests.answer import CollectedExperts, FinalChunk, OutputChunk, RoutedExperts
from api.requests.generate_params import (
    MAX_CHOICES,
    EmbeddingsPrompt,
    GenerateParams,
    Prompt,
    TextPrompt,
    TokenIdsPrompt,
    check_context,
    check_vocabulary,
)
from api.requests.served_model import ServedModel
from common.limits import MAX_EMBEDDING_BYTES
from common.request import NUMBER_BYTES
from common.requests.sampling import MAX_LOGPROBS
from router.token_buffer import UNKNOWN_VERSION

_DEFAULT_MAX_TOKENS = 128  # SGLang's default
# Each event of a stream repeats the whole response so far. Beyond this size, in characters, tokens
# and log-probabilities, the response must grow by a fraction before the next event. So a stream has
# at most about 128 times the size of its response.
_SIZE_OF_EACH_PIECE = 1024
_GROWTH = 128

_TokenLists = list[TokenId | list[TokenId]]
_Matrices = list[list[float | list[float]]]


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Ignored = None
    no_stop_trim: Nothing = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[TokenId, float] | None = None
    custom_params: Nothing = None


class NativeFields(msgspec.Struct, kw_only=True):
    """Request fields. Absent and null mean the same."""

    text: str | Annotated[list[str], msgspec.Meta(max_length=MAX_CHOICES)] | None = None
    input_ids: _TokenLists | None = None
    input_embeds: _Matrices | None = None
    sampling_params: SamplingFields | None = None
    stream: bool | None = None
    stream_interval: StreamInterval | None = None
    model: str | None = None
    lora_path: ModelName | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = None
    return_routed_experts: bool | None = None


class _CommonFields(GenerationFields, kw_only=True):
    """The sampling fields under OpenAI's names."""

    where: ClassVar[str] = "sampling_params."


class NativeFinishReason(msgspec.Struct, omit_defaults=True):
    type: str
    length: int | None = None


class WeightVersionSpan(msgspec.Struct):
    """Tokens of a response from one version of the weights, up to the next span."""

    first_token: int  # index in the response
    weight_version: str


class MetaInfo(LogprobFields):
    id: str
    finish_reason: NativeFinishReason | None
    prompt_tokens: int
    completion_tokens: int
    weight_version: str  # of the last token, hexadecimal
    weight_versions: list[WeightVersionSpan] | msgspec.UnsetType = msgspec.UNSET
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET  # seconds
    # A list of the states of the prompt's tokens, then the state of each generated token except the
    # last.
    hidden_states: list[Any] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: RoutedExperts = msgspec.UNSET
    sampling_seed: int | msgspec.UnsetType = msgspec.UNSET  # only for a batch-invariant response


class NativeResponse(msgspec.Struct, omit_defaults=True):
    """One response so far. Each event of a stream has all of it."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None  # only in a stream with several responses


def _call(
    fields: NativeFields, num_bytes: int, model_format: ModelFormat, ignored: list[str]
) -> EndpointCall:
    common = _common(fields)
    check_multiplied(common, num_bytes)
    logprobs = _logprob_options(fields)
    num_top = logprobs.num_top if logprobs.requested else -1
    silent = common.max_tokens == 0
    per_prompt = samplings(
        common,
        1 if silent else common.max_tokens,
        logprobs=num_top,
        prompt_logprobs=num_top if logprobs.prompt_start >= 0 else -1,
        prompt_logprobs_start=max(logprobs.prompt_start, 0),
    )
    prompts, is_list = _prompts(fields)
    _check_number(len(prompts) * len(per_prompt))
    given = fields.sampling_params and fields.sampling_params.max_new_tokens is not None
    limit = "sampling.max_tokens" if given else ""
    requests = choices(common, prompts, per_prompt, max_tokens_field=limit, silent=silent)
    is_list, stream = is_list or len(requests) > 1, bool(fields.stream)
    return EndpointCall(
        fields.model,
        requests,
        lambda origin: _Responses(requests, origin.id, logprobs, is_list=is_list, stream=stream),
        stream,
        fields.user or "",
        fields.lora_path,
        form_field(common),
    )


def _logprob_options(fields: NativeFields) -> LogprobOptions:
    """Return the requested log-probabilities. As in SGLang, only `return_logprob` requests any."""
    if not fields.return_logprob:
        return LogprobOptions()
    start = fields.logprob_start_len
    return LogprobOptions(
        requested=True,
        prompt_start=-1 if start is None else start,
        num_top=fields.top_logprobs_num or 0,
        with_text=bool(fields.return_text_in_logprobs),
    )


def _common(fields: NativeFields) -> _CommonFields:
    """Return the sampling fields by OpenAI's names. Raise ApiError for unsupported values."""
    sampling = fields.sampling_params or SamplingFields()
    if sampling.skip_special_tokens is False:
        field = "sampling_params.skip_special_tokens"
        raise invalid(field, "is not supported by this server", code="unsupported")
    limit = sampling.max_new_tokens
    return _CommonFields(
        stream=fields.stream,
        stream_interval=fields.stream_interval,
        max_tokens=_DEFAULT_MAX_TOKENS if limit is None else limit,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        return_hidden_states=fields.return_hidden_states,
        return_routed_experts=fields.return_routed_experts,
        **{name: getattr(sampling, name) for name in _SAME_NAMES},
    )


_SAME_NAMES = {*SamplingFields.__struct_fields__} & {*GenerationFields.__struct_fields__}
# Fields with other names, or in another place, than in the router.
_OTHER_NAMES = {
    **{name: f"{_CommonFields.where}{name}" for name in _SAME_NAMES},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "prompt_logprobs_start": "logprob_start_len",
    "token_ids": "input_ids",
    "input_embeddings": "input_embeds",
}
NATIVE = Dialect("", NativeFields, OF_NATIVE, _call, other_names=_OTHER_NAMES)


def _prompts(fields: NativeFields) -> tuple[Sequence[Prompt], bool]:
    """Return the prompts, and whether the request has a list of them."""
    match fields.text, fields.input_ids, fields.input_embeds:
        case str(text), None, None:
            return [TextPrompt(text)], False
        case [*texts], None, None if texts:
            return [TextPrompt(text) for text in texts], True
        case None, [int(), *_] as ids, None if all(isinstance(token, int) for token in ids):
            return [TokenIdsPrompt(cast(list[int], ids))], False
        case None, [[*_], *_] as lists, None if all(isinstance(ids, list) for ids in lists):
            _check_number(len(lists))
            return [TokenIdsPrompt(ids) for ids in cast(list[list[int]], lists)], True
        case None, None, [[float(), *_], *_] as rows:
            return [_embeddings(rows)], False
        case None, None, [[[*_], *_], *_] as matrices:
            _check_number(len(matrices))
            return [_embeddings(rows) for rows in matrices], True
        case _:
            raise invalid("text", ": set exactly one of text, input_ids and input_embeds")


def _check_number(num_answers: int) -> None:
    """Raise ApiError for too many responses to one request."""
    if num_answers > MAX_CHOICES:
        sentence = f"at most {MAX_CHOICES} responses to one request are allowed"
        raise ApiError(400, sentence, param="sampling_params.n")


def _embeddings(rows: list[Any]) -> EmbeddingsPrompt:
    """Return a prompt with these rows. Raise ApiError unless they form a matrix of allowed size."""
    values = array("f")
    try:
        sizes = {len(row) for row in rows}
        if len(sizes) > 1:
            raise invalid("input_embeds", "has rows of different lengths")
        num_bytes = len(rows) * sizes.pop() * NUMBER_BYTES
        if num_bytes > MAX_EMBEDDING_BYTES:
            raise invalid("input_embeds", f"has {num_bytes} bytes, {MAX_EMBEDDING_BYTES} allowed")
        for row in rows:
            values.extend(row)
    except TypeError:
        raise invalid("input_embeds", "must be a matrix, or a list of matrices") from None
    return EmbeddingsPrompt(values.tobytes(), len(rows))


class _Answer:
    """One response so far."""

    def __init__(
        self,
        index: int,
        request: GenerateParams,
        answer_id: str,
        is_one_of_several: bool,
        logprobs: CollectedLogprobs,
    ) -> None:
        self._index = index if is_one_of_several else None
        self._request = request
        self._id = f"{answer_id}-{index}" if is_one_of_several else answer_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._size = 0  # in characters, tokens and log-probabilities
        self._sent_size = 0
        self._began = time.monotonic()
        self._end: FinalChunk | None = None
        self._version = UNKNOWN_VERSION
        self._prompt_states: list[list[float]] = []
        self._states: list[list[float]] = []
        self._experts = CollectedExperts()
        self._logprobs = logprobs

    def add(self, piece: OutputChunk | FinalChunk) -> None:
        if piece.states is not None:
            self._prompt_states += map(_floats, piece.states.prompt_hidden_states)
            self._states += map(_floats, piece.states.hidden_states)
            self._experts.add(piece.states)
        self._version = piece.version
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        self._size += len(piece.text) + len(piece.token_ids) + self._logprobs.add(piece)
        if isinstance(piece, FinalChunk):
            self._end = piece

    @property
    def is_due(self) -> bool:
        """Return whether the response has ended, or has grown enough since the last event."""
        sent = self._sent_size
        return (
            self._end is not None
            or self._size - sent >= max(sent - _SIZE_OF_EACH_PIECE, 0) / _GROWTH
        )

    def response(self) -> NativeResponse:
        text = "".join(self._texts)
        self._texts = [text]
        self._sent_size = self._size
        return NativeResponse(text, self._token_ids, self._meta_info(), self._index)

    def _meta_info(self) -> MetaInfo:
        num = len(self._token_ids)
        meta = MetaInfo(
            id=self._id,
            finish_reason=None,
            prompt_tokens=self._request.prompt.rendering.num_tokens,
            completion_tokens=num,
            weight_version=self._version.weights.hex(),
        )
        self._logprobs.fill(meta)
        if self._end is None:
            return meta
        reason = self._end.finish_reason
        meta.finish_reason = NativeFinishReason(reason, num if reason == "length" else None)
        meta.weight_versions = _weight_versions(self._end)
        if self._end.usage.cached_tokens is not None:
            meta.cached_tokens = self._end.usage.cached_tokens
        meta.e2e_latency = time.monotonic() - self._began
        if self._prompt_states:
            meta.hidden_states = [self._prompt_states, *self._states]
        meta.routed_experts = self._experts.encoded
        if self._end.seed is not None:
            meta.sampling_seed = self._end.seed
        return meta


def _floats(state: bytes) -> list[float]:
    return array("f", state).tolist()


def _weight_versions(last: FinalChunk) -> list[WeightVersionSpan] | msgspec.UnsetType:
    """Return the weight versions of a response, unset if all tokens have the same one."""
    if len(last.versions) < 2:
        return msgspec.UNSET
    return [
        WeightVersionSpan(span.first_token, span.version.weights.hex()) for span in last.versions
    ]


class _Responses(ResponseContent):
    """The responses to one request: a JSON object, a list of them, or a stream.

    As in SGLang, each event of a stream has the whole response so far. Events become rarer as a
    response grows: with an event for each token, n tokens would produce n² of text.
    """

    def __init__(
        self,
        requests: Sequence[GenerateParams],
        answer_id: str,
        logprobs: LogprobOptions,
        *,
        is_list: bool,
        stream: bool,
    ) -> None:
        self._answers = [
            _Answer(index, each, answer_id, is_list, CollectedLogprobs(logprobs))
            for index, each in enumerate(requests)
        ]
        self._is_list = is_list
        self._stream = stream

    def add(self, index: int, piece: OutputChunk | FinalChunk) -> bytes:
        answer = self._answers[index]
        answer.add(piece)
        if not (self._stream and answer.is_due):
            return b""
        return b"data: " + encode(answer.response()) + b"\n\n"

    def end(self) -> bytes:
        if self._stream:
            return DONE
        responses: Any = [answer.response() for answer in self._answers]
        return encode(responses if self._is_list else responses[0])


_Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class TokenizeFields(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    prompt: str | _Texts | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: ModelName | None = None


class Tokenized(msgspec.Struct):
    """Token ids of a prompt. For several prompts, each field is a list."""

    tokens: Sequence[int | Sequence[int]]
    count: int | Sequence[int]
    max_model_len: int
    token_strs: Sequence[str | Sequence[str]] | None


class Detokenized(msgspec.Struct):
    prompt: str
    text: str  # the same as above, by SGLang's name


async def tokenize(model: ServedModel, fields: TokenizeFields, client: Client) -> Tokenized:
    """Return the response of /tokenize."""
    prompts = _texts_or_conversation(fields)
    ids = [await model.prompts.encode(prompt, client) for prompt in prompts]
    names = [model.tokenizer.names(each) for each in ids] if fields.return_token_strs else None
    length = model.limits.context_length
    if isinstance(fields.prompt, list):
        return Tokenized(ids, [len(each) for each in ids], length, names)
    return Tokenized(ids[0], len(ids[0]), length, names and names[0])


async def detokenize(model: ServedModel, fields: DetokenizeFields, client: Client) -> Detokenized:
    """Return the response of /detokenize."""
    check_context(fields.tokens, model.limits, "tokens")
    check_vocabulary(fields.tokens, model.limits, "tokens")
    text = await model.tokenizer.decode_any(fields.tokens)
    return Detokenized(text, text)


def _texts_or_conversation(fields: TokenizeFields) -> Sequence[Prompt]:
    """Return the prompts. Raise ApiError unless either prompt or messages is set."""
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("prompt", ": set either prompt or messages")
    if fields.messages is not None:
        if fields.add_special_tokens:
            raise invalid(
                "add_special_tokens",
                ": not supported with messages, whose chat template adds special tokens",
            )
        tools = [shown(tool.function) for tool in fields.tools or ()]
        return [conversation(fields, fields.messages, tools)]
    texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt or []
    return [TextPrompt(text, fields.add_special_tokens is not False) for text in texts]

"""Request fields that all generation endpoints share, and their conversion to parameters."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec.structs import replace

from api.dialect.bodies import Ignored
from api.dialect.problems import ApiError, invalid
from api.requests.generate_params import (
    MAX_CHOICES,
    UNLIMITED,
    GenerateParams,
    PredictionPrompt,
    Prompt,
    RequestGroup,
    TextPrompt,
    TokenIdsPrompt,
    any_seed,
)
from common.limits import MAX_STREAM_INTERVAL
from common.requests.sampling import (
    JSON_OBJECT,
    GuidedDecoding,
    SamplingParams,
    check_bad_words,
    check_counts,
    check_lengths,
)

MAX_GUIDE_CHOICES = 1024


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None  # schemas are always strict


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A response format. The last three fields belong to structural tags of vLLM and SGLang.

    `format` is the newer form of a structural tag, `structures` and `triggers` are the older one.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured outputs. At most one field is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class GuideFields(msgspec.Struct, kw_only=True):
    """Fields for guided decoding. At most one is set.

    Attributes:
        where: prefix of a field's name in errors.
    """

    where: ClassVar[str] = ""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


_all_fields = attrgetter(*GuideFields.__struct_fields__)
_NOTHING_GIVEN = (None,) * len(GuideFields.__struct_fields__)


def form_field(fields: GuideFields) -> str:
    """Return the name of the field that requests a response format, or ""."""
    given = zip(GuideFields.__struct_fields__, _all_fields(fields), strict=True)
    return next((f"{fields.where}{name}" for name, value in given if value is not None), "")


def guide_of(fields: GuideFields) -> GuidedDecoding | None:
    """Return the guide that the fields ask for.

    Raises:
        ApiError: two fields ask for one, or a value is invalid.
    """
    if _all_fields(fields) == _NOTHING_GIVEN:
        return None
    nested = fields.structured_outputs or StructuredOutputs()
    said = {
        "response_format": _of_format(fields.response_format),
        "structured_outputs.json": _guide("json_schema", nested.json),
        "structured_outputs.regex": _guide("regex", nested.regex),
        "structured_outputs.choice": _choice("structured_outputs.choice", nested.choice),
        "structured_outputs.grammar": _guide("ebnf", nested.grammar),
        "structured_outputs.json_object": JSON_OBJECT if nested.json_object else None,
        "structured_outputs.structural_tag": _guide("structural_tag", nested.structural_tag),
        "guided_json": _guide("json_schema", fields.guided_json),
        "guided_regex": _guide("regex", fields.guided_regex),
        "guided_choice": _choice("guided_choice", fields.guided_choice),
        "guided_grammar": _guide("ebnf", fields.guided_grammar),
        "json_schema": _guide("json_schema", fields.json_schema),
        "regex": _guide("regex", fields.regex),
        "ebnf": _guide("ebnf", fields.ebnf),
        "structural_tag": _guide("structural_tag", fields.structural_tag),
    }
    given = {f"{fields.where}{name}": guide for name, guide in said.items() if guide is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise ApiError(400, f"{names} each set a response format", param=next(iter(given)))
    return next(iter(given.values()), None)


def _of_format(response_format: ResponseFormat | None) -> GuidedDecoding | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return JSON_OBJECT
    if response_format.type == "structural_tag":
        said = msgspec.structs.asdict(response_format).items()
        return _guide("structural_tag", {name: each for name, each in said if each is not None})
    if response_format.json_schema is None:
        raise invalid("response_format.json_schema", "is required")
    return _guide("json_schema", response_format.json_schema.schema)


def _guide(kind: str, value: str | dict[str, Any] | None) -> GuidedDecoding | None:
    if value is None or value == "":
        return None
    return GuidedDecoding(
        kind, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    )


def _choice(where: str, choices: list[str] | None) -> GuidedDecoding | None:
    if not choices:
        return None
    if len(choices) > MAX_GUIDE_CHOICES or not all(choices):
        raise invalid(where, f"must have at most {MAX_GUIDE_CHOICES} texts, none of them empty")
    quoted = (msgspec.json.encode(choice).decode() for choice in choices)
    return GuidedDecoding("ebnf", f"root ::= {' | '.join(quoted)}")


# Each choice is a separate request to a node with the whole prompt, so n multiplies the body.
MAX_BYTES = 12 << 20

# Errors repeat the name, and escaping can make each character ten.
ModelName = Annotated[str, msgspec.Meta(max_length=1024)]
# Range of the wire format. Allowed ranges are checked in one place, with every request.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]  # -1: unlimited
StreamInterval = Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAM_INTERVAL)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
TextOrTokens = str | list[str | TokenId | list[TokenId]]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Ignored = None  # the last event has all of it


class GenerationFields(GuideFields, kw_only=True):
    """Request fields. Absent and null mean the same."""

    model: ModelName | None = None
    lora_path: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: StreamInterval | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    seed: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = None
    return_routed_experts: bool | None = None


def prompts_of(
    name: str, given: TextOrTokens, *, special: bool = True
) -> Sequence[TextPrompt | TokenIdsPrompt]:
    """Return the prompts of a field: a text, token ids, or a list of either.

    Args:
        name: name of the field, for errors.
        special: texts get the tokenizer's special tokens.
    """
    if isinstance(given, str):
        return [TextPrompt(given, special)]
    match {type(item) for item in given}:
        case kinds if not kinds:
            raise invalid(name, "is empty")
        case kinds if kinds == {int}:
            return [TokenIdsPrompt(cast(list[int], given))]
        case kinds if kinds == {str}:
            return [TextPrompt(text, special) for text in cast(list[str], given)]
        case kinds if kinds == {list}:
            return [TokenIdsPrompt(ids) for ids in cast(list[list[int]], given)]
        case _:
            raise invalid(name, "mixes text, token ids and lists of them")


def check_multiplied(fields: GenerationFields, num_bytes: int, best_of: int = 1) -> None:
    """Check the total size of a request's prompts over all of its choices.

    Args:
        num_bytes: size of the body.
        best_of: number of responses to each prompt, if more than `n`.

    Raises:
        ApiError: there are too many choices for a body of this size.
    """
    own = f"{fields.where}n"
    name, count = ("best_of", best_of) if best_of > 1 else (own, fields.n or 1)
    if num_bytes * count > MAX_BYTES:
        sentence = (
            f"{name} = {count} copies of a body of {num_bytes} bytes exceed {MAX_BYTES} bytes"
        )
        raise ApiError(413, sentence, param=name)


def samplings(
    fields: GenerationFields,
    max_tokens: int | None,
    *,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    prompt_logprobs_start: int = 0,
    thinking_budget: int | None = None,
    best_of: int = 1,
) -> Sequence[SamplingParams]:
    """Return sampling parameters for each of the n choices of a prompt, unchecked.

    They differ only in the seed.

    Args:
        best_of: number of responses to a prompt, if more than n.
        max_tokens: None: as many as fit into the context.
        logprobs, prompt_logprobs: -1: none.
        prompt_logprobs_start: index of the first prompt token with a log-probability.

    Raises:
        ApiError: two response formats are requested, or an invalid one.
        InvalidRequest: a list is too long to be copied.
    """
    check_counts(fields.stop_token_ids or (), ())
    check_lengths(fields.logit_bias or (), fields.allowed_token_ids or (), ())
    seeds = [
        any_seed() if fields.seed is None else _derived(fields.seed, number)
        for number in range(max(fields.n or 1, best_of))
    ]
    first = SamplingParams(
        max_tokens=UNLIMITED if max_tokens is None else max_tokens,
        seed=seeds[0],
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=fields.top_k or -1,  # other servers accept 0 for all, too
        min_p=_given(fields.min_p, 0.0),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        min_tokens=fields.min_tokens or 0,
        logit_bias=tuple(sorted((fields.logit_bias or {}).items())),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
        hidden_states=bool(fields.return_hidden_states),
        routed_experts=bool(fields.return_routed_experts),
        guide=guide_of(fields),
        thinking_budget=-1 if thinking_budget is None else thinking_budget,
    )
    return [first, *(replace(first, seed=seed) for seed in seeds[1:])]


def choices(
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    per_prompt: Sequence[SamplingParams],
    *,
    max_tokens_field: str = "",
    shown: frozenset[int] = frozenset(),
    echo: bool = False,
    silent: bool = False,
    prediction: PredictionPrompt | None = None,
) -> Sequence[GenerateParams]:
    """Return the choices that a request asks for, unchecked.

    Each prompt gets one choice for each of `per_prompt`. The choices of a prompt are adjacent.

    Args:
        max_tokens_field, shown, echo, silent: see GenerateParams.
        prediction: the prediction of each choice.

    Raises:
        InvalidRequest: a list is too long to be copied.
    """
    together = RequestGroup.of(prompts, len(per_prompt))
    stop, stop_regex = _texts(fields.stop), _texts(fields.stop_regex)
    bad_words = tuple(fields.bad_words or ())
    check_counts((), stop)
    check_counts((), stop_regex, "stop_regex")
    check_bad_words(bad_words)
    return [
        GenerateParams(
            prompt=prompt,
            together=together,
            sampling=sampling,
            max_tokens_field=max_tokens_field,
            drawn=fields.seed is None,
            stop=stop,
            stop_regex=stop_regex,
            bad_words=bad_words,
            cache_salt=fields.cache_salt,
            priority=fields.priority,
            shown=shown,
            echo=echo,
            silent=silent,
            prediction=prediction,
            whole=not fields.stream,
            stream_interval=fields.stream_interval or 0,
        )
        for prompt in together.prompts
        for sampling in per_prompt
    ]


def session_of(fields: GenerationFields) -> str:
    """Return the session of a request, or ""."""
    return fields.prompt_cache_key or fields.user or ""


def includes_usage(fields: GenerationFields) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _texts(said: str | list[str] | None) -> Sequence[str]:
    if said is None:
        return ()
    return (said,) if isinstance(said, str) else tuple(said)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _derived(seed: int, number: int) -> int:
    """Return the seed of a choice. Choice 0 has the given seed, as a response for n = 1 has."""
    return (seed + number * _GOLDEN) & _MASK

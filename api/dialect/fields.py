"""Fields of all generation endpoints except the prompt, and their SamplingParams, n times."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec.structs import replace

from api.dialect.guides import GuideFields, guide_of
from api.dialect.problems import ApiError
from api.dialect.unknown_fields import Ignored
from api.requests.generate_params import (
    UNLIMITED,
    GenerateParams,
    PredictionPrompt,
    Prompt,
    RequestGroup,
    SharedPrompt,
    any_seed,
)
from api.text.limits import MAX_CHOICES
from common.requests.sampling import (
    SamplingParams,
    check_bad_words,
    check_counts,
    check_lengths,
)

# Each choice is a separate request to the nodes with the whole prompt, so n multiplies the body.
MAX_BYTES = 12 << 20

# Errors repeat the name, and escaping can make each character ten.
ModelName = Annotated[str, msgspec.Meta(max_length=1024)]
# The range of the wire format. The allowed range is checked with every request, in one place.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]  # -1: none
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Ignored = None  # in addition to the text. The last event has all of it


class GenerationFields(GuideFields, kw_only=True):
    """Request fields. Absent and null mean the same."""

    model: ModelName | None = None
    lora_path: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    seed: int | None = None
    user: str | None = None
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


def check_multiplied(fields: GenerationFields, body: bytes, best_of: int = 1) -> None:
    """Check the total size of a request's prompts over all of its choices.

    Args:
        best_of: responses to each prompt, if more than its choices.

    Raises:
        ApiError: there are too many choices for a body of this size.
    """
    own = f"{fields.where}n"
    name, count = ("best_of", best_of) if best_of > 1 else (own, fields.n or 1)
    if len(body) * count > MAX_BYTES:
        sentence = f"{name} = {count} makes more than {MAX_BYTES} bytes of a body of {len(body)}"
        raise ApiError(413, sentence, param=name)


def samplings(
    fields: GenerationFields,
    max_tokens: int | None,
    *,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    thinking_budget: int = -1,
    best_of: int = 1,
) -> Sequence[SamplingParams]:
    """Return sampling parameters for each of the n choices of a prompt.

    They differ in the seed only.

    The values are not checked.

    Args:
        best_of: number of responses to a prompt, if more than n.
        max_tokens: None: as many as fit into the context.
        logprobs, prompt_logprobs, thinking_budget: -1: none.

    Raises:
        ApiError: two response formats are requested, or an invalid one.
        InvalidRequest: a list is too long to be copied.
    """
    check_counts(fields.stop_token_ids or (), ())
    check_lengths(fields.logit_bias or (), fields.allowed_token_ids or (), ())
    first = SamplingParams(
        max_tokens=UNLIMITED if max_tokens is None else max_tokens,
        seed=any_seed() if fields.seed is None else _derived(fields.seed, 0),
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
        guide=guide_of(fields),
        thinking_budget=thinking_budget,
    )
    return [
        first,
        *(
            replace(
                first, seed=any_seed() if fields.seed is None else _derived(fields.seed, number)
            )
            for number in range(1, max(fields.n or 1, best_of))
        ),
    ]


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
    expected = None if prediction is None else SharedPrompt(prediction)
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
            prediction=expected,
        )
        for prompt in together.prompts
        for sampling in per_prompt
    ]


def includes_usage(fields: GenerationFields) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _texts(said: str | list[str] | None) -> Sequence[str]:
    if said is None:
        return ()
    return (said,) if isinstance(said, str) else tuple(said)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _derived(seed: int, number: int) -> int:
    """Return the seed of a choice.

    Choice 0 has the seed itself, so it equals the response for n = 1.
    """
    return (seed + number * _GOLDEN) & _MASK

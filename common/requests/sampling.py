"""Sampling parameters of a request: one immutable record from the router to the sampler.

A guide is the required form of a response: a schema, regex, grammar or structural tag. Reasoning is
the beginning of a response, before the visible text.
"""

from collections.abc import Mapping, Sequence, Sized
from operator import attrgetter, le
from typing import Any

import msgspec

from common.errors import InvalidRequest, check_at_most
from protos import sampling_pb2 as pb
from protos.sampling_pb2 import Sampling

MAX_GUIDE_CHARACTERS = 64 << 10
KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")


class GuidedDecoding(msgspec.Struct, frozen=True):
    kind: str  # one of KINDS
    text: str  # empty for a json_object


class Prepared(msgspec.Struct, frozen=True):
    """A guide in the form that the grammar compiler gets, which enforces all of it.

    Attributes:
        text: input of the compiler.
        has_tokens: it is a structural tag that names tokens.
    """

    kind: str
    text: str
    has_tokens: bool = False


JSON_OBJECT = GuidedDecoding("json_object", "")


def tag(form: Mapping[str, Any]) -> GuidedDecoding:
    """Return a guide for a structural tag with that format."""
    said = {"type": "structural_tag", "format": form}
    return GuidedDecoding("structural_tag", msgspec.json.encode(said).decode())


def as_form(guide: GuidedDecoding) -> Mapping[str, Any] | None:
    """Return the guide's format for use within a structural tag.

    None: it is already a structural tag, or invalid JSON.
    """
    match guide.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            try:
                msgspec.json.decode(guide.text)
            except (msgspec.DecodeError, RecursionError):
                return None
            return {"type": "json_schema", "json_schema": msgspec.Raw(guide.text.encode())}
        case "regex":
            return {"type": "regex", "pattern": guide.text}
        case "ebnf":
            return {"type": "grammar", "grammar": guide.text}
        case _:
            return None


def guide_from_proto(proto: pb.Guide) -> GuidedDecoding:
    """Parse a guide. Raises InvalidRequest if it is empty."""
    match proto.WhichOneof("form"):
        case None:
            raise InvalidRequest("sampling.guide has no kind")
        case "json_object":
            return JSON_OBJECT
        case kind:
            return GuidedDecoding(kind, getattr(proto, kind))


def guide_fields(guide: GuidedDecoding) -> dict[str, object]:
    return {guide.kind: True if guide.kind == "json_object" else guide.text}


def check_guide(guide: GuidedDecoding) -> None:
    """Check the length. Raises InvalidRequest. Only the compiler can check the content."""
    check_at_most("sampling.guide", len(guide.text), "characters", MAX_GUIDE_CHARACTERS)
    if guide.kind != "json_object" and not guide.text:
        raise InvalidRequest(f"sampling.guide has an empty {guide.kind}")


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens that delimit reasoning.

    Attributes:
        close: token that ends it.
        open: token that begins it, as the first one of the response. None: the prompt has it.
    """

    close: int
    open: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.close,) if self.open is None else (self.open, self.close)


def reasoning_from_proto(proto: pb.Thought) -> ReasoningTokens:
    return ReasoningTokens(proto.close, proto.open if proto.HasField("open") else None)


def reasoning_fields(thought: ReasoningTokens) -> dict[str, Any]:
    return {"close": thought.close, "open": thought.open}


MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 64  # as text; each can have several tokenizations
MAX_BAD_WORD_IDS = 256
MAX_BAD_WORD_TOKENS = 64
STRONGEST_BIAS = 100.0
MAX_TOKEN_ID = 2**31 - 1  # nodes store ids as int32
# Limits of the float32 fields sent to nodes.
_LARGEST = (2 - 2**-23) * 2.0**127
_ABOVE_0 = 2.0**-149
# Far beyond any use, and far below float32 overflow of logits, which would end the request with an
# error after it was computed and look like a fault of the model.
_STRONGEST = 2.0**20
# name, lowest value, highest value, range in error messages
_RANGES = (
    ("max_tokens", 1, _LARGEST, "at least 1"),
    ("temperature", 0.0, _LARGEST, "at least 0"),
    ("top_p", _ABOVE_0, 1.0, "in (0, 1]"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("repetition_penalty", 1 / _STRONGEST, _STRONGEST, "from 1e-6 to 1e6"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("min_tokens", 0, _LARGEST, "at least 0"),
    ("logprobs", -1, MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
    ("prompt_logprobs", -1, MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
    ("prompt_logprobs_start", 0, _LARGEST, "at least 0"),
    ("thinking_budget", -1, _LARGEST, "at least 0"),
)
_NAMES, _LOWEST, _HIGHEST, _ = zip(*_RANGES, strict=True)
_ranged = attrgetter(*_NAMES)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling parameters. Stop strings stay in the router.

    A token is a function of (logits, seed, token index), and so the same on every node.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int = -1  # most likely tokens to return per token; -1: no log-probabilities
    prompt_logprobs: int = -1
    prompt_logprobs_start: int = 0  # index of the first prompt token with one; 0: as 1
    hidden_states: bool = False  # also return the state that predicted each token
    routed_experts: bool = False  # also return the experts of the token before each
    guide: GuidedDecoding | None = None  # required form of the response
    thinking_budget: int = -1  # tokens after which reasoning is ended; -1: no limit
    thought: ReasoningTokens | None = None  # reasoning delimiters, if the node needs them

    @property
    def non_default(self) -> frozenset[str]:
        """Return the names of the parameters that differ from their defaults."""
        optional = zip(_OPTIONAL, _optional(self), strict=True)
        return frozenset(name for (name, default), value in optional if value != default)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def ends_at_eos(self) -> bool:
        """True if an end-of-sequence token ends the response.

        With a guide it always does, because nothing can follow the end of the grammar.
        """
        return not self.ignore_eos or self.guide is not None

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first prompt token with a log-probability. Token 0 has none."""
        return max(self.prompt_logprobs_start, 1)

    @property
    def returns_states(self) -> bool:
        """Return whether log-probabilities come with hidden states or routed experts."""
        return self.hidden_states or self.routed_experts

    @property
    def penalised(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


_OPTIONAL = tuple(
    (each.name, each.default)
    for each in msgspec.structs.fields(SamplingParams)
    if not each.required
)
_optional = attrgetter(*(name for name, _ in _OPTIONAL))
# Parameters that are one number in the proto.
_SCALARS = frozenset(SamplingParams.__struct_fields__).difference(
    ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_word_ids", "guide", "thought")
)


def from_proto(proto: Sampling, *, max_tokens: int, seed: int) -> SamplingParams:
    """Validate all fields of `proto` and fill in unset ones.

    Args:
        max_tokens: used if it is unset in the proto.
        seed: used if it is unset in the proto.
    Raises:
        InvalidRequest: names the field.
    """
    params = unchecked(proto, max_tokens=max_tokens, seed=seed)
    check(params)
    check_stop(proto.stop)
    return params


def unchecked(proto: Sampling, *, max_tokens: int, seed: int) -> SamplingParams:
    """Parse `proto` like `from_proto`, without `check`, which the caller must call later.

    Raises:
        InvalidRequest: a list is too long.
    """
    check_counts(proto.stop_token_ids, proto.stop)
    words = [word.ids for word in proto.bad_word_ids[: MAX_BAD_WORD_IDS + 1]]
    check_lengths(proto.logit_bias, proto.allowed_token_ids, words)
    scalars = {field.name: value for field, value in proto.ListFields() if field.name in _SCALARS}
    return SamplingParams(
        **{"max_tokens": max_tokens, "seed": seed, **scalars},
        stop_token_ids=tuple(proto.stop_token_ids),
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        allowed_token_ids=tuple(proto.allowed_token_ids),
        bad_word_ids=tuple(map(tuple, words)),
        guide=guide_from_proto(proto.guide) if proto.HasField("guide") else None,
        thought=reasoning_from_proto(proto.thought) if proto.HasField("thought") else None,
    )


def to_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of the wire form, for a larger message. A message would be copied."""
    fields = msgspec.structs.asdict(params)
    fields["logit_bias"] = dict(params.logit_bias)
    fields["bad_word_ids"] = [{"ids": word} for word in params.bad_word_ids]
    for name in ("logprobs", "prompt_logprobs", "thinking_budget"):
        if fields[name] < 0:
            del fields[name]
    fields["guide"] = None if params.guide is None else guide_fields(params.guide)
    fields["thought"] = None if params.thought is None else reasoning_fields(params.thought)
    return fields


def check(params: SamplingParams) -> None:
    """Check the parameters. Raises InvalidRequest with the field's name."""
    values = _ranged(params)
    if not (all(map(le, _LOWEST, values)) and all(map(le, values, _HIGHEST))):  # rejects NaN too
        raise _out_of_range(values)
    if params.top_k < 1 and params.top_k != -1:
        raise InvalidRequest(f"sampling.top_k must be -1 or at least 1, got {params.top_k}")
    check_counts(params.stop_token_ids, ())
    for token in params.stop_token_ids:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest(
                f"sampling.stop_token_ids must be in [0, {MAX_TOKEN_ID}], got {token}"
            )
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"sampling.min_tokens is {params.min_tokens}: the response has at most "
            f"{params.max_tokens} tokens"
        )
    if params.guide is not None:
        check_guide(params.guide)
    check_lengths(params.logit_bias, params.allowed_token_ids, params.bad_word_ids)
    for token, bias in params.logit_bias:
        if not abs(bias) <= STRONGEST_BIAS:  # rejects NaN too
            raise InvalidRequest(
                f"sampling.logit_bias must be in [-100, 100], got {bias} for token {token}"
            )


def _out_of_range(values: Sequence[float]) -> InvalidRequest:
    """Return the error for the first value out of its range.

    Args:
        values: in the order of `_RANGES`. At least one is out of its range.
    """
    rows = zip(_RANGES, values, strict=True)
    name, rule, value = next((n, r, v) for (n, low, high, r), v in rows if not low <= v <= high)
    return InvalidRequest(f"sampling.{name} must be {rule}, got {value}")


def check_lengths(
    logit_bias: Sized, allowed_token_ids: Sized, bad_word_ids: Sequence[Sized]
) -> None:
    """Check lengths only. Raises InvalidRequest as `check` does."""
    check_at_most("sampling.logit_bias", len(logit_bias), "tokens", MAX_BIASES)
    allowed = "sampling.allowed_token_ids"
    check_at_most(allowed, len(allowed_token_ids), "ids", MAX_ALLOWED_TOKEN_IDS)
    words = "sampling.bad_word_ids"
    check_at_most(words, len(bad_word_ids), "words", MAX_BAD_WORD_IDS)
    for word in bad_word_ids:
        check_at_most(words, len(word), "tokens in a word", MAX_BAD_WORD_TOKENS)
        if not len(word):
            raise InvalidRequest("sampling.bad_word_ids has an empty word")


def check_bad_words(bad_words: Sequence[str]) -> None:
    """Check bad words. Raises InvalidRequest as `check` does."""
    check_at_most("sampling.bad_words", len(bad_words), "words", MAX_BAD_WORDS)
    if not all(bad_words):
        raise InvalidRequest("sampling.bad_words has an empty string")


def check_counts(stop_token_ids: Sized, stop: Sized, name: str = "stop") -> None:
    """Check the number of stop conditions only. Raises InvalidRequest as `check` does.

    Args:
        name: name of the field with `stop`.
    """
    check_at_most("sampling.stop_token_ids", len(stop_token_ids), "ids", MAX_STOP_TOKEN_IDS)
    check_at_most(f"sampling.{name}", len(stop), "strings", MAX_STOP_STRINGS)


def check_stop(stop: Sequence[str]) -> None:
    """Check stop strings. Raises InvalidRequest as `check` does."""
    check_counts((), stop)
    if not all(stop):
        raise InvalidRequest("sampling.stop has an empty string")

"""OpenAI responses: combines the pieces of all choices into JSON bodies or streams."""

import codecs
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from api.dialect.generation_endpoint import DONE, RequestOrigin, ResponseContent, encode
from api.requests.answer import (
    CollectedExperts,
    FinalChunk,
    LikelyTokenText,
    OutputChunk,
    PromptReport,
    RoutedExperts,
    TokenReport,
)
from common.request import NOT_PREDICTED, tokens_of
from router.token_buffer import UNKNOWN_VERSION, ModelVersion

StopReason: TypeAlias = str | int | msgspec.UnsetType
HiddenState: TypeAlias = list[float] | msgspec.UnsetType
TokenIds: TypeAlias = list[int] | msgspec.UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Counts of predicted tokens. Rejected tokens do not count as completion tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class FingerprintSpan(msgspec.Struct):
    """Consecutive tokens of a choice with the same fingerprint, up to the next span."""

    first_token: int  # index in the choice
    system_fingerprint: str | None


FingerprintSpans: TypeAlias = list[FingerprintSpan] | msgspec.UnsetType


class ChoiceEnd(msgspec.Struct, kw_only=True):
    """Fields known at the end of a choice, for all endpoints. Those not requested are unset."""

    stop_reason: StopReason = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET
    system_fingerprints: FingerprintSpans = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    hidden_states: HiddenState = msgspec.UNSET
    routed_experts: RoutedExperts = msgspec.UNSET


class OpenAiUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ResponseEnvelope(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    system_fingerprint: str | None = None
    usage: OpenAiUsage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class ResponseWriter(Protocol):
    """Writes one choice in its endpoint's format.

    Pieces are passed in order. Either all go to `chunk`, or all to `choice`.
    """

    def chunk(self, piece: OutputChunk | FinalChunk) -> msgspec.Struct | None:
        """Return a piece's addition to a streamed response, None if nothing can be sent yet.

        Never returns None for the first and the last piece.
        """
        ...

    def choice(self, pieces: Sequence[OutputChunk], last: FinalChunk) -> msgspec.Struct:
        """Return the choice in a whole response. `pieces` includes `last`."""
        ...


class ChoiceCollector(msgspec.Struct, frozen=True):
    """Format of the choices of one request.

    Attributes:
        writer: returns the writer of the choice with this index.
        returns_prompt_ids: the response has the prompt's token ids, from its first choice.
    """

    whole_object: str
    chunk_object: str
    num: int
    num_per_prompt: int  # choices of one prompt, which are adjacent
    stream: bool
    include_usage: bool
    writer: Callable[[int], ResponseWriter]
    num_kept: int = 0  # best choices of a prompt to return in a whole response. 0: all
    returns_prompt_ids: bool = False

    def content(self, origin: RequestOrigin) -> ResponseContent:
        return _Chunks(self, origin) if self.stream else _Response(self, origin)


class _Response(ResponseContent):
    """The whole response with all choices, as one JSON object."""

    def __init__(self, choices: ChoiceCollector, origin: RequestOrigin) -> None:
        self._choices = choices
        self._origin = origin
        self._pieces: list[list[OutputChunk]] = [[] for _ in range(choices.num)]
        self._ends: dict[int, FinalChunk] = {}

    def add(self, index: int, piece: OutputChunk | FinalChunk) -> bytes:
        self._pieces[index].append(piece)
        if isinstance(piece, FinalChunk):
            self._ends[index] = piece
        return b""

    def end(self) -> bytes:
        choices = [
            self._choices.writer(index).choice(self._pieces[place], self._ends[place])
            for index, place in enumerate(self._kept())
        ]
        usage = _usage(self._ends, self._choices.num_per_prompt)
        version = self._ends[self._choices.num - 1].version
        first = self._pieces[0][0] if self._choices.returns_prompt_ids else None
        return _encoded(self._origin, self._choices.whole_object, choices, version, usage, first)

    def _kept(self) -> Iterator[int]:
        """Yield the indices of the choices to return, the best first for each prompt."""
        num = self._choices.num_per_prompt
        for first in range(0, self._choices.num, num):
            places: Sequence[int] = range(first, first + num)
            if self._choices.num_kept not in (0, num):
                places = sorted(places, key=self._likelihood, reverse=True)
                places = places[: self._choices.num_kept]
            yield from places

    def _likelihood(self, place: int) -> float:
        """Return the mean log-probability of a choice's tokens."""
        tokens = [token for piece in self._pieces[place] for token in piece.tokens]
        return sum(token.logprob or 0.0 for token in tokens) / max(len(tokens), 1)


class _Chunks(ResponseContent):
    """The events of a streamed response: one for each batch of tokens, and [DONE] at the end."""

    def __init__(self, choices: ChoiceCollector, origin: RequestOrigin) -> None:
        self._choices = choices
        self._writers = [choices.writer(index) for index in range(choices.num)]
        self._origin = origin
        # If usage is requested, every chunk has the field, and only the last one has a value. All
        # other events consist of this text around their choice.
        self._usage = None if choices.include_usage else msgspec.UNSET
        self._begin(UNKNOWN_VERSION)
        self._ends: dict[int, FinalChunk] = {}

    def _begin(self, version: ModelVersion) -> None:
        self._version = version
        self._before, _, self._after = self._event((), self._usage).rpartition(b"]")

    def _event(
        self,
        choices: Sequence[msgspec.Struct],
        usage: OpenAiUsage | msgspec.UnsetType | None,
        first: OutputChunk | None = None,
    ) -> bytes:
        kind = self._choices.chunk_object
        content = _encoded(self._origin, kind, choices, self._version, usage, first)
        return b"data: %b\n\n" % content

    def add(self, index: int, piece: OutputChunk | FinalChunk) -> bytes:
        if isinstance(piece, FinalChunk):
            self._ends[index] = piece
        chunk = self._writers[index].chunk(piece)
        if chunk is None:
            return b""
        if piece.version != self._version:
            self._begin(piece.version)
        if self._choices.returns_prompt_ids and index == 0 and piece.prompt_token_ids:
            return self._event([chunk], self._usage, first=piece)
        return b"%b%b]%b" % (self._before, encode(chunk), self._after)

    def end(self) -> bytes:
        if not self._choices.include_usage:
            return DONE
        usage = _usage(self._ends, self._choices.num_per_prompt)
        return self._event((), usage) + DONE


def fingerprint_fields(last: FinalChunk) -> dict[str, Any]:
    """Return the fields that identify the versions of a response.

    They are the fingerprint of the last token, the fingerprint spans if there are several, and the
    seed that reproduces a batch-invariant response in a request of its own.
    """
    fields: dict[str, Any] = {"system_fingerprint": last.version.system_fingerprint}
    if len(last.versions) > 1:
        fields["system_fingerprints"] = [
            FingerprintSpan(span.first_token, span.version.system_fingerprint)
            for span in last.versions
        ]
    if last.seed is not None:
        fields["seed"] = last.seed
    return fields


class ReturnedStates:
    """Collects the state that predicted a choice's last token, and the experts of all tokens."""

    def __init__(self) -> None:
        self._requested = False
        self._last = b""  # hidden state of the latest generated token
        self._experts = CollectedExperts()

    def add(self, piece: OutputChunk) -> None:
        if (states := piece.states) is not None:
            self._experts.add(states)
            self._requested = self._requested or bool(states.prompt_hidden_states)
            self._last = states.hidden_states[-1] if states.hidden_states else self._last

    def end(self, choice: ChoiceEnd, last: FinalChunk) -> None:
        """Set the returned states of a choice after its last piece was added.

        The hidden state is empty if only one token was generated, as in SGLang.
        """
        choice.stop_reason = msgspec.UNSET if last.stop_reason is None else last.stop_reason
        fields = fingerprint_fields(last)
        choice.system_fingerprints = fields.get("system_fingerprints", msgspec.UNSET)
        choice.seed = fields.get("seed", msgspec.UNSET)
        choice.routed_experts = self._experts.encoded
        if self._requested:
            choice.hidden_states = array("f", self._last).tolist()


def prompt_ids(first: OutputChunk) -> list[int]:
    """Return the token ids of the prompt, from the first piece of a choice."""
    return list(tokens_of(first.prompt_token_ids))


def generated_ids(pieces: Sequence[OutputChunk]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def _encoded(
    origin: RequestOrigin,
    kind: str,
    choices: Sequence[msgspec.Struct],
    version: ModelVersion,
    usage: OpenAiUsage | msgspec.UnsetType | None,
    first: OutputChunk | None,
) -> bytes:
    """Return the envelope. `first`: piece with the prompt's token ids, if they are returned."""
    return encode(
        ResponseEnvelope(
            origin.id,
            kind,
            origin.created,
            origin.model,
            choices,
            version.system_fingerprint,
            usage,
            msgspec.UNSET if first is None else prompt_ids(first),
        )
    )


def _usage(ends: dict[int, FinalChunk], num_per_prompt: int) -> OpenAiUsage:
    """Return the usage. A prompt counts once, however many choices it has."""
    prompts = [ends[index].usage for index in range(0, len(ends), num_per_prompt)]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in ends.values())
    cached = [usage.cached_tokens for usage in prompts if usage.cached_tokens is not None]
    return OpenAiUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(cached)) if cached else msgspec.UNSET,
        completion_tokens_details=_completion_details(ends.values()),
    )


def _completion_details(
    ends: Iterable[FinalChunk],
) -> CompletionTokensDetails | msgspec.UnsetType:
    predicted = [end.usage.predicted for end in ends if end.usage.predicted is not None]
    if not predicted:
        return msgspec.UNSET
    of_all = sum(predicted, NOT_PREDICTED)
    return CompletionTokensDetails(of_all.accepted, of_all.rejected)


_utf8 = codecs.getincrementaldecoder("utf-8")


class LikelyToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Columns with an entry for each token. The first token of a prompt has no values."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def of_chat(tokens: Sequence[TokenReport]) -> ChatLogprobs | None:
    """Return log-probabilities of a chat, None if they are not requested."""
    if not tokens:
        return None
    return ChatLogprobs(
        [
            ContentToken(
                _name(token),
                token.json_logprob,
                list(token.spelt),
                [LikelyToken(_name(top), top.json_logprob, list(top.spelt)) for top in token.top],
            )
            for token in tokens
        ]
    )


class TextTokens:
    """Converts the tokens of one completion to log-probabilities, in order.

    A text offset counts the characters before a token. Tokens of one character share its offset.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = _utf8("replace")

    def logprobs(
        self, tokens: Sequence[TokenReport], prompt: PromptReport | None = None
    ) -> TextLogprobs | None:
        """Return log-probabilities of the next tokens, None if they are not requested.

        Args:
            prompt: the prompt, if `tokens` begin with its tokens.
        """
        if not tokens:
            return None
        if prompt is not None:
            self._offset -= _num_beside(prompt)
        offsets = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(token.spelt))
        return TextLogprobs(
            offsets,
            [None if token.logprob is None else token.json_logprob for token in tokens],
            [_name(token) for token in tokens],
            [_likeliest(token) for token in tokens],
        )


def _num_beside(prompt: PromptReport) -> int:
    """Return how many characters of a prompt's tokens precede its text.

    These are the BOS token, and a space that the tokenizer puts before a text.
    """
    spelt = b"".join(token.spelt for token in prompt.tokens).decode(errors="replace")
    return len(spelt) - len(prompt.text) if spelt.endswith(prompt.text) else 0


def _likeliest(token: TokenReport) -> dict[str, float] | None:
    """Return the most likely tokens, which always include the token itself."""
    if token.logprob is None:
        return None
    return {_name(each): each.json_logprob for each in (*token.top, token)}


def _name(token: LikelyTokenText) -> str:
    """Return a token's text, or its bytes if it is a part of a character."""
    try:
        return token.spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelt)

"""The response of one request: converts tokens to pieces of text, log-probabilities and usage."""

from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from api.requests.generate_params import TokenizedRequest
from api.text.tokenizer import Detokenizer
from common.request import NOT_PREDICTED, PredictionUsage
from common.requests.logprobs import TokenLogprobs
from router.token_buffer import UNKNOWN_VERSION, ModelVersion, NodeOutput, StreamEnd

Spell: TypeAlias = Callable[[int], bytes]  # returns the bytes of a token
_LEAST = -9999.0  # used for -inf, which JSON lacks


class LikelyTokenText(msgspec.Struct, frozen=True):
    token: int
    spelt: bytes
    logprob: float | None  # None for the first token of a prompt

    @property
    def json_logprob(self) -> float:
        """Return the log-probability as a number that JSON can represent."""
        return _LEAST if self.logprob is None else max(self.logprob, _LEAST)


class TokenReport(LikelyTokenText, frozen=True):
    """A token of a response or its prompt.

    Attributes:
        top: most likely tokens at its position, in descending order.
    """

    top: Sequence[LikelyTokenText]


class PromptReport(msgspec.Struct, frozen=True):
    """The prompt, in the first piece of a response, if requested.

    Attributes:
        tokens: none, or all. Tokens before the first requested log-probability have none.
    """

    text: str
    tokens: Sequence[TokenReport]


def token_report(token: int, logprobs: TokenLogprobs, num_top: int, spell: Spell) -> TokenReport:
    pairs = zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True)
    top = [LikelyTokenText(other, spell(other), logprob) for other, logprob in pairs][:num_top]
    return TokenReport(token, spell(token), logprobs.logprob, top)


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: not reported to the client
    predicted: PredictionUsage | None = None  # None: the request has no prediction


class VersionSpan(msgspec.Struct, frozen=True):
    """Consecutive tokens of a response with the same version, up to the next span."""

    first_token: int  # index in the response
    version: ModelVersion


# The prompt's states are sent once, with the first token. Each later token is sent with the state
# of the generated token before it.
class PieceStates(msgspec.Struct, frozen=True):
    """Hidden states and routed experts of a piece, those that are requested.

    Attributes:
        prompt_hidden_states, hidden_states: each state as float32.
        prompt_routed_experts, routed_experts: int16 [any, layers, experts per token].
    """

    prompt_hidden_states: Sequence[bytes]
    hidden_states: Sequence[bytes]
    prompt_routed_experts: bytes
    routed_experts: bytes


class _OutputPart(msgspec.Struct, frozen=True, kw_only=True):
    marks: Sequence[int] = ()  # indices in the text of special tokens that are markers
    tokens: Sequence[
        TokenReport
    ] = ()  # all tokens of the piece, if log-probabilities are requested
    prompt: PromptReport | None = None  # in the first piece, if requested
    prompt_token_ids: bytes = b""  # in the first piece, little-endian int32
    version: ModelVersion = UNKNOWN_VERSION  # of the last token so far
    states: PieceStates | None = None  # None: not requested


class OutputChunk(_OutputPart, frozen=True):
    """An addition to a response."""

    text: str
    token_ids: Sequence[int]


class FinalChunk(OutputChunk, frozen=True):
    """The end of a response."""

    finish_reason: str  # "stop" | "length"
    stop_reason: str | int | None  # the stop string or requested stop token that ended the response
    usage: TokenUsage
    cached_tokens: int  # cached prompt tokens, for the router's metrics
    versions: Sequence[VersionSpan] = ()  # at least one
    seed: int | None = None  # seed of sampling, if all tokens are batch-invariant


# Writes a piece of a response to the client.
Write: TypeAlias = Callable[[OutputChunk | FinalChunk], Awaitable[None]]
# Writes a piece that is not the last, unless that would wait. Returns whether it has written.
Offer: TypeAlias = Callable[[OutputChunk], bool]


class ResponseBuilder:
    """Builds one response.

    Text is held back while a character or a stop is undecided. The last piece has the rest. Tokens
    after the one that completes a stop are discarded.

    Args:
        silent: the one generated token is discarded.
        returns_cached_tokens: usage has the number of cached prompt tokens.
    """

    def __init__(
        self,
        job: TokenizedRequest,
        detokenizer: Detokenizer,
        spell: Spell,
        *,
        silent: bool = False,
        returns_cached_tokens: bool = True,
    ) -> None:
        self._spec = job.spec
        self._sampling = job.client_sampling
        self._detokenizer = detokenizer
        self._spell = spell
        self._silent = silent
        self._returns_cached_tokens = returns_cached_tokens
        self._stops = None if job.stops is None else job.stops.begin()
        self._echo = job.echo
        # The next three are false once the prompt is returned.
        self._returns_prompt = job.echo is not None or self._sampling.prompt_logprobs >= 0
        self._prompt_token_ids = job.spec.token_ids
        self._returns_prompt_states = self._sampling.returns_states
        self._predicted = NOT_PREDICTED if job.spec.prediction else None
        self._cached_tokens: int | None = None  # as reported by the first node
        self.token_ids: list[int] = []  # all tokens so far
        self._versions: list[VersionSpan] = []
        self._length = 0  # length of the text so far, in characters

    @property
    def version(self) -> ModelVersion:
        """Return the version of the last token so far."""
        return self._versions[-1].version if self.token_ids else UNKNOWN_VERSION

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        """Keep the first report: a replay counts KV from the first attempt as cached.

        Args:
            cached_tokens: number of cached prompt tokens. None: not reported yet.
        """
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def add(self, output: NodeOutput) -> OutputChunk | FinalChunk:
        """Add output and return the next piece. Must not be called again after a FinalChunk."""
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
        if self._predicted is not None:
            self._predicted += output.predicted
        prompt = None
        if self._returns_prompt:
            prompt, self._returns_prompt = self._prompt(output.prompt_logprobs), False
        token_ids, end = output.token_ids, output.end
        if self._silent:
            token_ids = ()
            end = end and StreamEnd("length")
        piece = self._piece(token_ids, end, output.version)
        tokens: Sequence[TokenReport] = ()
        if self._sampling.logprobs >= 0:
            num_top, spell = self._sampling.logprobs, self._spell
            each_token = zip(piece.token_ids, output.logprobs, strict=False)
            tokens = [token_report(*each, num_top, spell) for each in each_token]
        marks = self._take_marks(len(piece.text))
        prompt_ids, self._prompt_token_ids = self._prompt_token_ids, b""
        if self._sampling.returns_states:
            piece = self._with_states(piece, output)
        if not (tokens or prompt or marks or prompt_ids):
            return piece
        return replace(
            piece, tokens=tokens, prompt=prompt, marks=marks, prompt_token_ids=prompt_ids
        )

    def _prompt(self, logprobs: Sequence[TokenLogprobs]) -> PromptReport:
        """Return the prompt for the first piece.

        Args:
            logprobs: log-probabilities of all tokens from the first requested one on, or none.
        """
        text, num_top, spell = self._echo or "", self._sampling.prompt_logprobs, self._spell
        if not logprobs and num_top < 0:
            return PromptReport(text, ())
        first, token_ids = self._sampling.first_prompt_logprob, self._spec.tokens
        before = [TokenReport(token, spell(token), None, ()) for token in token_ids[:first]]
        others = zip(token_ids[first:], logprobs, strict=True)
        reports = (token_report(*other, num_top, spell) for other in others)
        return PromptReport(text, [*before, *reports])

    def _with_states(
        self, piece: OutputChunk | FinalChunk, output: NodeOutput
    ) -> OutputChunk | FinalChunk:
        """Return the piece with the hidden states that predicted its tokens, and their experts.

        The first token was predicted from the state of the last prompt token.
        """
        num_tokens = max(len(piece.token_ids), int(self._silent))
        generated, prompt = output.logprobs[:num_tokens], list[TokenLogprobs]()
        if self._returns_prompt_states and generated:
            self._returns_prompt_states = False
            prompt, generated = [*output.prompt_logprobs, generated[0]], generated[1:]
        states = PieceStates(
            [each.hidden_state for each in prompt if each.hidden_state],
            [each.hidden_state for each in generated if each.hidden_state],
            b"".join(each.experts for each in prompt),
            b"".join(each.experts for each in generated),
        )
        return replace(piece, states=states)

    def _take_marks(self, num_characters: int) -> Sequence[int]:
        """Return the markers within the next characters of the text, relative to their start."""
        begun, marks = self._length, self._detokenizer.marks
        self._length += num_characters
        taken = []
        while marks and marks[0] < self._length:
            taken.append(marks.popleft() - begun)
        return taken

    def _piece(
        self, token_ids: Sequence[int], end: StreamEnd | None, version: ModelVersion
    ) -> OutputChunk | FinalChunk:
        text, num_taken, stopped = self._text_of(token_ids)
        if not stopped and end is not None:
            rest, stopped = self._rest()
            text += rest
        taken = token_ids[:num_taken]
        if not self._versions or (taken and version != self._versions[-1].version):
            self._versions.append(VersionSpan(len(self.token_ids), version))
        self.token_ids += taken
        if stopped:
            assert self._stops is not None
            return self._last(text, taken, "stop", self._stops.found)
        if end is not None:
            reason = self._stop_token() if end.finish_reason == "stop" else None
            return self._last(text, taken, end.finish_reason, reason)
        return OutputChunk(text, taken, version=self._versions[-1].version)

    def _stop_token(self) -> int | None:
        """Return the stop token that ended the response. None for EOS, which is not reported."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self._sampling.stop_token_ids else None

    def _text_of(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """Return the text of these tokens, how many of them count, and whether a stop matched."""
        if self._stops is None:
            text = self._detokenizer.push(token_ids) if token_ids else ""
            return text, len(token_ids), False
        text = ""
        # One at a time, because usage counts up to the token that completes the stop.
        for number, token in enumerate(token_ids, start=1):
            decided, stopped = self._detokenizer.push((token,)), False
            if len(self.token_ids) + number > self._sampling.min_tokens:
                decided, stopped = self._stops.push(decided)
            text += decided
            if stopped:
                return text, number, True
        return text, len(token_ids), False

    def _rest(self) -> tuple[str, bool]:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest, False
        decided, stopped = self._stops.push(rest)
        return (decided, True) if stopped else (decided + self._stops.flush(), False)

    def _last(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> FinalChunk:
        # A node that continues a response may also have found generated tokens in its cache.
        num_prompt_tokens = self._spec.num_tokens
        cached_tokens = min(self._cached_tokens or 0, num_prompt_tokens)
        reported = cached_tokens if self._returns_cached_tokens else None
        usage = TokenUsage(num_prompt_tokens, len(self.token_ids), reported, self._in_answer())
        invariant = all(span.version.batch_invariant for span in self._versions)
        return FinalChunk(
            *(text, token_ids, finish_reason, stop_reason, usage, cached_tokens, self._versions),
            seed=self._spec.sampling.seed if invariant else None,
            version=self._versions[-1].version,
        )

    def _in_answer(self) -> PredictionUsage | None:
        """Return the counts of predicted tokens up to the end of the response."""
        if self._predicted is None:
            return None
        accepted = min(self._predicted.accepted, len(self.token_ids))
        return PredictionUsage(accepted, self._predicted.rejected)


# Base64 of int32 [prompt and generated tokens except the last, layers, experts per token].
RoutedExperts: TypeAlias = str | msgspec.UnsetType


class CollectedExperts:
    """Collects the routed experts of a response's prompt and tokens."""

    def __init__(self) -> None:
        self._ids = array("h")

    def add(self, states: PieceStates) -> None:
        self._ids.frombytes(states.prompt_routed_experts)
        self._ids.frombytes(states.routed_experts)

    @property
    def encoded(self) -> RoutedExperts:
        """Return the experts for JSON. Unset if not requested."""
        return b64encode(array("i", self._ids)).decode() if self._ids else msgspec.UNSET

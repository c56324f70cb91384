"""Batches the tokens of requests with a stream interval before they are sent to the router.

The first token of a request is sent at once, then each group of `stream_interval` tokens, and the
rest with its end. The server process holds them, because it outlives an engine crash: its last
message has all tokens that the engine has computed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from common.request import PredictionUsage
from common.requests.logprobs import Logprobs
from node.messages import StepTokens

MAX_HELD = 1 << 14  # per router, which bounds the message that sends them


class TokenRows(NamedTuple):
    """Tokens to send, in columns of equal length, with their log-probabilities and ends."""

    requests: list[int]
    tokens: list[int]
    logprobs: list[tuple[int, Logprobs]]
    predicted: list[tuple[int, PredictionUsage]]


class _Held:
    """The unsent tokens of one request.

    Attributes:
        num_due: number of tokens at which they are sent.
    """

    __slots__ = ("interval", "logprobs", "num_due", "predicted", "tokens")

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.num_due = 1
        self.tokens: list[int] = []
        self.logprobs: list[tuple[int, Logprobs]] = []
        self.predicted: list[tuple[int, PredictionUsage]] = []


class HeldTokens:
    """The held tokens of one router stream. Event loop only.

    Attributes:
        requests: requests whose tokens are held, by number.
    """

    def __init__(self) -> None:
        self.requests: dict[int, _Held] = {}
        self._num_tokens = 0

    def begin(self, number: int, interval: int) -> None:
        """Hold tokens of a request until it ends. `interval`: tokens to send at a time."""
        self.requests[number] = _Held(interval)

    def take(self, step: StepTokens) -> TokenRows:
        """Add the tokens of a step. Returns the tokens to send now."""
        now = TokenRows([], [], [], [])
        due = self._hold(*step.columns(), now)
        for number, logprobs in step.logprobs:
            held = self.requests.get(number)
            (now if held is None else held).logprobs.append((number, logprobs))
        for number, predicted in step.predicted:
            held = self.requests.get(number)
            (now if held is None else held).predicted.append((number, predicted))
        ended = {end.request for end in step.ended} & self.requests.keys()
        self._release((*due, *ended), now)
        for number in ended:
            del self.requests[number]
        if self._num_tokens > MAX_HELD:
            self._release(self.requests, now)
        return now

    def take_all(self) -> TokenRows:
        now = TokenRows([], [], [], [])
        self._release(self.requests, now)
        return now

    def _hold(self, requests: list[int], tokens: list[int], now: TokenRows) -> list[int]:
        """Hold these tokens, or add them to `now`. Returns the requests whose tokens are due."""
        due: list[int] = []
        find = self.requests.get
        for number, token in zip(requests, tokens, strict=True):
            held = find(number)
            if held is None:
                now.requests.append(number)
                now.tokens.append(token)
                continue
            held.tokens.append(token)
            if len(held.tokens) == held.num_due:
                due.append(number)
        self._num_tokens += len(tokens) - len(now.tokens)
        return due

    def _release(self, numbers: Iterable[int], now: TokenRows) -> None:
        for number in numbers:
            held = self.requests[number]
            if not held.tokens:
                continue
            now.requests.extend([number] * len(held.tokens))
            now.tokens.extend(held.tokens)
            now.logprobs.extend(held.logprobs)
            now.predicted.extend(held.predicted)
            self._num_tokens -= len(held.tokens)
            held.num_due = held.interval
            held.tokens, held.logprobs, held.predicted = [], [], []

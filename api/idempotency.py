"""Idempotency keys: a client that repeats a request with the same key gets the same response.

    request with a key -> running, clients follow it -> ended, kept for `keep_s`
                          `--all clients left--> runs for `keep_s`, then cancelled

A repeated request gets the response from its beginning: the existing part immediately, and the rest
as it is generated. A response belongs to its client, key and request. Other clients never get it,
and the same key with another request is rejected. A failed response is dropped, so a repeated
request is computed again.
"""

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from api.auth.client import Client
from api.generation import Dispatcher
from api.requests.answer import FinalChunk, Offer, OutputChunk, Write
from api.requests.generate_params import GenerateParams, RenderedPrompt, SharedPrompt
from common.errors import InvalidRequest, RequestAborted, check_at_most

MAX_KEY_CHARACTERS = 256
MAX_BYTES = 64 << 20  # estimated size of all responses
_ANSWER_BYTES = 4000  # estimated size of a response without pieces
_PIECE_BYTES = 400  # estimated size of a piece, without its text and tokens
_TOKEN_BYTES = 36

Name = tuple[str, str, int]  # client, key, index of the response


class IdempotentRetry(NamedTuple):
    """One request with an idempotency key, possibly with several responses.

    Attributes:
        request_id: id of the first request with this key.
    """

    client: str
    key: str
    digest: bytes  # hash of the request
    request_id: str

    def seed(self, index: int) -> int:
        """Return the seed of one response, the same at every router for one key and request."""
        content = f"{self.key} {index}".encode() + self.digest
        return int.from_bytes(hashlib.sha256(content).digest()[:8])


class IdempotencyCache:
    """Responses of requests with idempotency keys. For one event loop.

    Attributes:
        dispatcher: serves requests without a key.

    Args:
        keep_s: seconds for which a response is kept after its end, or continues without clients. 0:
            keys are ignored.
    """

    def __init__(
        self, dispatcher: Dispatcher, *, keep_s: float, max_bytes: int = MAX_BYTES
    ) -> None:
        self.dispatcher = dispatcher
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._answers: dict[Name, _Answer] = {}
        self._ended: OrderedDict[Name, _Answer] = OrderedDict()  # oldest first
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of responses, running or kept."""
        return len(self._answers)

    def retry(
        self, client: Client, key: str, content: Callable[[], bytes], request_id: str
    ) -> IdempotentRetry | None:
        """Return the state of a request with a key, or None if keys are ignored.

        Args:
            content: returns the content of the request.
            request_id: used if this is the first request with the key.

        Raises:
            InvalidRequest: the key is too long, or the client has used it for another request.
        """
        if not self._keep_s:
            return None
        check_at_most("the idempotency key", len(key), "characters", MAX_KEY_CHARACTERS)
        digest = hashlib.sha256(content()).digest()
        first = self._answers.get((client.name, key, 0))
        if first is None:
            return IdempotentRetry(client.name, key, digest, request_id)
        if first.retry.digest != digest:
            raise InvalidRequest("the idempotency key was used for another request")
        return first.retry

    async def generate(
        self,
        request: GenerateParams,
        client: Client,
        write: Write,
        traceparent: str = "",
        offer: Offer = lambda piece: False,
        *,
        retry: IdempotentRetry,
        index: int = 0,
    ) -> None:
        """Generate as Dispatcher.generate does. A repeated request gets its earlier response.

        Args:
            index: index of the response within the request.
        """
        name = (retry.client, retry.key, index)
        answer = self._answers.get(name)
        if answer is None or answer.retry.digest != retry.digest or answer.task.cancelling():
            answer = self._begin(name, retry, request, client, traceparent)
        await answer.follow(request.prompt, write, self._keep_s)

    def _begin(
        self,
        name: Name,
        retry: IdempotentRetry,
        request: GenerateParams,
        client: Client,
        traceparent: str,
    ) -> "_Answer":
        self._forget(name)
        if request.drawn:
            sampling = msgspec.structs.replace(request.sampling, seed=retry.seed(name[2]))
            request = msgspec.structs.replace(request, sampling=sampling)
        answer = _Answer(
            retry,
            request.prompt.rendering,
            lambda answer, num_bytes: self._grown(name, answer, num_bytes),
        )
        self._answers[name] = answer
        work = self.dispatcher.generate(request, client, answer.write, traceparent, answer.offer)
        answer.task = asyncio.create_task(work)
        answer.task.add_done_callback(lambda task: self._over(name, answer, task))
        self._grown(name, answer, _ANSWER_BYTES)
        return answer

    def _grown(self, name: Name, answer: "_Answer", num_bytes: int) -> None:
        """Add `num_bytes` to a response's size, and free memory beyond the limit.

        The responses that ended first are dropped. If that is not enough, this one is no longer
        kept, and only its current followers receive it.
        """
        answer.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and self._ended:
            self._forget(next(iter(self._ended)))
        if self._num_bytes > self._max_bytes:
            self._leave_out(name, answer)
            answer.keep_no_longer()

    def _over(self, name: Name, answer: "_Answer", task: "asyncio.Task[None]") -> None:
        answer.wake()
        failed = task.cancelled() or task.exception() is not None
        if failed or self._answers.get(name) is not answer:
            self._leave_out(name, answer)
            return
        self._ended[name] = answer
        answer.call_later(self._keep_s, lambda: self._forget(name))

    def _forget(self, name: Name) -> None:
        """Drop a response that has ended."""
        answer = self._ended.pop(name, None)
        if answer is not None:
            self._leave_out(name, answer)

    def _leave_out(self, name: Name, answer: "_Answer") -> None:
        answer.call_off()
        self._num_bytes -= answer.num_bytes
        answer.num_bytes = 0
        if self._answers.get(name) is answer:
            del self._answers[name]


class _Answer:
    """One response so far, and how far each follower has read it."""

    task: "asyncio.Task[None]"

    def __init__(
        self,
        retry: IdempotentRetry,
        rendering: RenderedPrompt,
        grown: "Callable[[_Answer, int], None]",
    ) -> None:
        self.retry = retry
        self._rendering = rendering  # without the rest of the prompt, which may be large
        self.num_bytes = 0  # estimated size, see IdempotencyCache
        self._grown = grown
        self._pieces: deque[OutputChunk | FinalChunk] = deque()
        self._num_dropped = 0  # pieces dropped because all followers have them
        self._places: dict[int, int] = {}  # number of pieces written, by follower
        self._next_follower = 0
        self._kept = True
        self._news = asyncio.Event()
        self._end: asyncio.TimerHandle | None = None

    async def write(self, piece: OutputChunk | FinalChunk) -> None:
        """Add a piece. If the response is not kept, wait for the slowest follower."""
        self._append(piece)
        while not self._kept and self._pieces:
            await self._news.wait()

    def offer(self, piece: OutputChunk) -> bool:
        taken = self._kept  # before memory may run out
        if taken:
            self._append(piece)
        return taken

    def _append(self, piece: OutputChunk | FinalChunk) -> None:
        self._pieces.append(piece)
        if self._kept:
            num_entries = len(piece.token_ids) + 20 * len(
                piece.tokens
            )  # with the likeliest alternatives
            self._grown(self, _PIECE_BYTES + 4 * len(piece.text) + _TOKEN_BYTES * num_entries)
        self.wake()

    def keep_no_longer(self) -> None:
        self._kept = False
        self._drop_read()

    def _drop_read(self) -> None:
        while self._pieces and self._num_dropped < min(self._places.values(), default=0):
            self._pieces.popleft()
            self._num_dropped += 1

    def wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, prompt: SharedPrompt, write: Write, keep_s: float) -> None:
        """Write the whole response. Raise the error with which it ended.

        Args:
            prompt: the follower's own prompt. Receives the rendering.
            keep_s: seconds for which the response continues after its last follower has left.
        """
        self._next_follower += 1
        follower, place = self._next_follower, 0
        self._places[follower] = place
        prompt.rendering = self._rendering
        if not self.task.done():
            self.call_off()
        try:
            while True:
                while place < self._num_dropped + len(self._pieces):
                    await write(self._pieces[place - self._num_dropped])
                    self._places[follower] = place = place + 1
                    if not self._kept:
                        self._drop_read()
                        self.wake()
                if self.task.cancelled():
                    raise RequestAborted("no client waits for this response")
                if self.task.done():
                    return self.task.result()
                await self._news.wait()
        finally:
            del self._places[follower]
            if not self._places and not self.task.done():
                self.call_later(keep_s if self._kept else 0.0, self.task.cancel)

    def call_later(self, seconds: float, end: Callable[[], object]) -> None:
        """Schedule the end of a response without followers. `call_off` cancels it."""
        self.call_off()
        self._end = asyncio.get_running_loop().call_later(seconds, end)

    def call_off(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

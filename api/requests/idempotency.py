"""Answers that their client may come back for, with the idempotency key that it gave.

    asked with a key -> under way, its clients follow it -> ended, kept for `keep_s`
                              `--all have left--> goes on for `keep_s`, then cancelled

Whoever asks the same with the same key meanwhile gets the same answer, from its beginning: what is
there at once, and the rest as it comes. An answer belongs to its client, its key and its question:
another client never meets it, and the same key with another request is refused. One that fails is
forgotten: who asks again is computed again.
"""

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from api.auth.client import Client
from api.requests.answer import LastPiece, Piece
from api.requests.generate_params import Rendering, SharedPrompt, Wanted
from common.errors import InvalidRequest, RequestAborted

MAX_KEY_CHARACTERS = 256
MAX_BYTES = 64 << 20  # of all answers, as far as they are counted
_ANSWER_BYTES = 4000  # of one without a piece
_PIECE_BYTES = 400  # besides its text and tokens
_TOKEN_BYTES = 36

Write = Callable[[str, Piece | LastPiece], Awaitable[None]]
Offer = Callable[[Piece], bool]
Name = tuple[str, str, int]  # client, key, which of the answers


class Generates(Protocol):
    async def generate(
        self,
        wanted: Wanted,
        client: Client,
        write: Write,
        traceparent: str = "",
        offer: Offer = ...,
    ) -> None: ...


class Retry(NamedTuple):
    """One request with a key, perhaps of several answers.

    Attributes:
        request_id: of the first one that was sent with it.
    """

    client: str
    key: str
    digest: bytes  # of what is asked
    request_id: str

    def seed(self, index: int) -> int:
        """Of one of the answers: the same at every router that is asked the same with this key."""
        told = f"{self.key} {index}".encode() + self.digest
        return int.from_bytes(hashlib.sha256(told).digest()[:8])


class KeptAnswers:
    """For one event loop.

    Args:
        keep_s: how long an answer is kept once it has ended, or goes on once its clients have left;
            0: keys are not heeded.
    """

    def __init__(self, generator: Generates, *, keep_s: float, max_bytes: int = MAX_BYTES) -> None:
        self._generator = generator
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._answers: dict[Name, _Answer] = {}
        self._ended: OrderedDict[Name, _Answer] = OrderedDict()  # oldest first
        self._num_bytes = 0

    def __len__(self) -> int:
        """Answers, under way and kept."""
        return len(self._answers)

    def retry(
        self, client: Client, key: str, asked: Callable[[], bytes], request_id: str
    ) -> Retry | None:
        """None: it cannot be retried, it has no key.

        Args:
            asked: gives all of what is asked; called where there is a key.
            request_id: of this request, if there was none like it.
        Raises:
            InvalidRequest: the key is too long, or the client has asked something else with it.
        """
        if not key or not self._keep_s:
            return None
        if len(key) > MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"the idempotency key has {len(key)} characters, {MAX_KEY_CHARACTERS} allowed"
            )
        digest = hashlib.sha256(asked()).digest()
        first = self._answers.get((client.name, key, 0))
        if first is None:
            return Retry(client.name, key, digest, request_id)
        if first.retry.digest != digest:
            raise InvalidRequest("the idempotency key was given for another request")
        return first.retry

    async def generate(
        self,
        wanted: Wanted,
        client: Client,
        write: Write,
        traceparent: str = "",
        offer: Offer = lambda piece: False,
        *,
        retry: Retry | None = None,
        index: int = 0,
    ) -> None:
        """As Generator.generate; of a request that was sent before, its answer.

        Args:
            index: which of the answers of one request.
        """
        if retry is None:
            await self._generator.generate(wanted, client, write, traceparent, offer)
            return
        name = (retry.client, retry.key, index)
        answer = self._answers.get(name)
        if answer is None or answer.retry.digest != retry.digest or answer.task.cancelling():
            answer = self._begin(name, retry, wanted, client, traceparent)
        await answer.follow(wanted.prompt, write, self._keep_s)

    def _begin(
        self, name: Name, retry: Retry, wanted: Wanted, client: Client, traceparent: str
    ) -> "_Answer":
        self._forget(name)
        if wanted.drawn:
            sampling = msgspec.structs.replace(wanted.sampling, seed=retry.seed(name[2]))
            wanted = msgspec.structs.replace(wanted, sampling=sampling)
        answer = _Answer(
            retry,
            wanted.prompt.rendering,
            lambda answer, num_bytes: self._grown(name, answer, num_bytes),
        )
        self._answers[name] = answer
        work = self._generator.generate(wanted, client, answer.write, traceparent, answer.offer)
        answer.task = asyncio.create_task(work)
        answer.task.add_done_callback(lambda task: self._over(name, answer, task))
        self._grown(name, answer, _ANSWER_BYTES)
        return answer

    def _grown(self, name: Name, answer: "_Answer", num_bytes: int) -> None:
        """Room is made at the cost of those that ended first; where that is not enough, of this
        one: it is kept no longer, and none but those who follow it get it."""
        answer.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and self._ended:
            self._forget(next(iter(self._ended)))
        if self._num_bytes > self._max_bytes:
            self._leave_out(name, answer)
            answer.keep_no_longer()

    def _over(self, name: Name, answer: "_Answer", task: "asyncio.Task[None]") -> None:
        answer.tell()
        failed = task.cancelled() or task.exception() is not None
        if failed or self._answers.get(name) is not answer:
            self._leave_out(name, answer)
            return
        self._ended[name] = answer
        answer.call_later(self._keep_s, lambda: self._forget(name))

    def _forget(self, name: Name) -> None:
        """If it has ended."""
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
    """What has come of one, and how far those who follow it are."""

    task: "asyncio.Task[None]"

    def __init__(
        self, retry: Retry, rendering: Rendering, grown: "Callable[[_Answer, int], None]"
    ) -> None:
        self.retry = retry
        self._rendering = rendering  # and no more of a prompt, which may be large
        self.num_bytes = 0  # as counted among those that are kept
        self._grown = grown
        self._request_id = retry.request_id
        self._pieces: deque[Piece | LastPiece] = deque()
        self._num_dropped = 0  # pieces that everybody has
        self._places: dict[int, int] = {}  # of followers: pieces written
        self._next_follower = 0
        self._kept = True
        self._news = asyncio.Event()
        self._end: asyncio.TimerHandle | None = None

    async def write(self, request_id: str, piece: Piece | LastPiece) -> None:
        """Waits for the slowest follower of one that is not kept."""
        self._request_id = request_id
        self._append(piece)
        while not self._kept and self._pieces:
            await self._news.wait()

    def offer(self, piece: Piece) -> bool:
        taken = self._kept  # before there turns out to be no room
        if taken:
            self._append(piece)
        return taken

    def _append(self, piece: Piece | LastPiece) -> None:
        self._pieces.append(piece)
        if self._kept:
            told = len(piece.token_ids) + 20 * len(piece.tokens)  # with what else was likely there
            self._grown(self, _PIECE_BYTES + 4 * len(piece.text) + _TOKEN_BYTES * told)
        self.tell()

    def keep_no_longer(self) -> None:
        self._kept = False
        self._drop_read()

    def _drop_read(self) -> None:
        while self._pieces and self._num_dropped < min(self._places.values(), default=0):
            self._pieces.popleft()
            self._num_dropped += 1

    def tell(self) -> None:
        """There is something new."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, prompt: SharedPrompt, write: Write, keep_s: float) -> None:
        """Writes all of it. Raises what the answer ended with.

        Args:
            prompt: the follower's own, which learns what has become of it.
            keep_s: how long it goes on when the last one who follows it leaves.
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
                    await write(self._request_id, self._pieces[place - self._num_dropped])
                    self._places[follower] = place = place + 1
                    if not self._kept:
                        self._drop_read()
                        self.tell()
                if self.task.cancelled():
                    raise RequestAborted("nobody waited for this answer any more")
                if self.task.done():
                    return self.task.result()
                await self._news.wait()
        finally:
            del self._places[follower]
            if not self._places and not self.task.done():
                self.call_later(keep_s if self._kept else 0.0, self.task.cancel)

    def call_later(self, seconds: float, end: Callable[[], object]) -> None:
        """Its end, by nobody's coming back. It may be called off."""
        self.call_off()
        self._end = asyncio.get_running_loop().call_later(seconds, end)

    def call_off(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

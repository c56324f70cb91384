"""The load that the system serves during the attack. Every answer is compared with an earlier one
to the same question.

Questions are sent over both protocols, streamed or not, and with greedy sampling, so there is one
right answer. If routers fail too, a client repeats failed questions, as docs/clients.md describes,
and the load records the times.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import grpc.aio

from protos.router_pb2 import GenerateRequest
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling
from tests.support.network import grpc_calls
from tests.support.network.http_client import connected, sse_events
from tools.demo.tasks import Exchange, recall, word_facts

_NUM_QUESTIONS = 24
_MAX_TOKENS = 12
_PATIENCE_S = 150.0
_AGAIN_S = 0.2


@dataclass(slots=True)
class Served:
    """Results of the load so far."""

    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of right answers
    # times of repeated questions, by time.monotonic()
    broken: list[tuple[float, str]] = field(default_factory=list)

    def also(self, more: "Served") -> None:
        """Add the results of another part of the load."""
        self.num_right += more.num_right
        self.wrong += more.wrong
        self.failed += more.failed
        self.seconds += more.seconds
        self.broken += more.broken

    def percentile(self, percent: int) -> float:
        """Return seconds until the whole answer."""
        return percentile(self.seconds, percent)


class Load:
    """A client of one router, with a key. Use as an async context manager."""

    def __init__(
        self,
        router: str,
        http_port: int,
        draw: Random,
        api_key: str,
        *,
        num_tokens: Sequence[int] = (_MAX_TOKENS,),
        asks_again: bool = False,
    ) -> None:
        """Args:
        num_tokens: lengths of responses. If a response ends earlier, it continues after its
            EOS.
        asks_again: repeat failed questions.
        """
        self._num_tokens = num_tokens
        self._asks_again = asks_again
        self._http_port = http_port
        self._authorization = f"Bearer {api_key}"
        self._channel = grpc.aio.insecure_channel(router, options=grpc_calls.OPTIONS)
        self._stub: Any = RouterStub(self._channel)  # type: ignore[no-untyped-call]
        self._questions = [_question(draw) for _ in range(_NUM_QUESTIONS)]
        self._answers: dict[tuple[str, int], str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def learn(self) -> None:
        """Ask every question once without an attack. The demo model must answer most of them
        correctly, or wrong answers could not be recognized."""
        for question in self._questions:
            for count in self._num_tokens:
                answer = await self._over_grpc(question.prompt, count)
                self._answers[question.prompt, count] = answer
        shortest = min(self._num_tokens)
        true = sum(self._answers[q.prompt, shortest].strip() == q.answer for q in self._questions)
        assert true >= 0.9 * len(self._questions), f"{true} of {len(self._questions)} are true"

    async def ask_for(self, seconds: float, num_clients: int) -> Served:
        """Let this number of clients ask questions continuously."""
        until = time.monotonic() + seconds
        return await self.ask_while(lambda: time.monotonic() < until, num_clients)

    async def ask_while(self, going: Callable[[], bool], num_clients: int) -> Served:
        served = Served()

        async def client(number: int) -> None:
            draw = Random(number)
            while going():
                await self._ask(draw.choice(self._questions), draw, served)

        async with asyncio.TaskGroup() as clients:
            for number in range(num_clients):
                clients.create_task(client(number))
        return served

    async def _ask(self, question: Exchange, draw: Random, served: Served) -> None:
        ways = (self._over_grpc, self._over_http, self._streamed_over_http)
        way = draw.choice(ways)
        count = draw.choice(self._num_tokens)
        started = time.monotonic()

        async def answered() -> str:
            while True:
                try:
                    return await way(question.prompt, count)
                except Exception as error:
                    if not self._asks_again:
                        raise
                    broken = f"{way.__name__}: {type(error).__name__}: {error}"[:300]
                    served.broken.append((time.monotonic(), broken))
                await asyncio.sleep(_AGAIN_S)

        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await answered()
        except Exception as error:  # noqa: BLE001 any error is part of the verdict
            served.failed.append(f"{way.__name__}: {type(error).__name__}: {error}"[:300])
            return
        if answer == self._answers[question.prompt, count]:
            served.num_right += 1
            served.seconds.append(time.monotonic() - started)
        else:
            served.wrong.append(f"{question.prompt[-60:]!r}: {answer!r}")

    async def _over_grpc(self, prompt: str, count: int) -> str:
        sampling = Sampling(
            max_tokens=count, temperature=0.0, ignore_eos=count > min(self._num_tokens)
        )
        request = GenerateRequest(text=prompt, sampling=sampling)
        shown = (("authorization", self._authorization),)
        return "".join([piece.text async for piece in self._stub.Generate(request, metadata=shown)])

    async def _over_http(self, prompt: str, count: int) -> str:
        (choice,) = (await self._posted(prompt, count, stream=False))["choices"]
        text: str = choice["text"]
        return text

    async def _streamed_over_http(self, prompt: str, count: int) -> str:
        events: Sequence[Any] = await self._posted(prompt, count, stream=True)
        return "".join(choice["text"] for event in events for choice in event["choices"])

    async def _posted(self, prompt: str, count: int, *, stream: bool) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": count > min(self._num_tokens),
            "stream": stream,
        }
        async with connected(self._http_port) as wire:
            await wire.post("/v1/completions", body, authorization=self._authorization)
            response = await wire.response(_PATIENCE_S)
        assert response.status == 200, f"{response.status}: {response.body[:200]!r}"
        return sse_events(response.body) if stream else response.json


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return 0 if there are none."""
    if len(seconds) < 2:
        return seconds[0] if seconds else 0.0
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def _question(draw: Random) -> Exchange:
    reported = word_facts(draw, draw.choice((60, 200, 600)))
    key = draw.choice(list(reported))
    return recall(reported, key, reported[key])

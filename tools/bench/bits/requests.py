"""Random requests, and the bits of their responses."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from protos.sampling_pb2 import Guide, Logprobs
from tests.support.processes.cluster import Cluster

ADAPTER = "adapter"
_TOKENS = range(1, 250)  # bytes that are not marks of the tests' models
_NUM_TOKENS = 32
_SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
_WAYS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 1.0},
    _SAMPLED,
    {**_SAMPLED, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {**_SAMPLED, "min_p": 0.02, "logit_bias": {65: 2.0, 66: -3.0}},
    {**_SAMPLED, "guide": Guide(regex="[a-z]{10}[0-9 ]{60}")},
    {"prompt_logprobs": 2},
)


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    adapter: str = ""

    @classmethod
    def of(cls, draw: Random, adapters: Sequence[str]) -> "ComparedRequest":
        """Draw a request, with one of these adapters."""
        length = draw.choice((5, 40, 90, 200, 530))
        sampling = {**draw.choice(_WAYS), "seed": draw.getrandbits(53), "ignore_eos": True}
        sampling |= {"logprobs": draw.choice((0, 3)), "max_tokens": _NUM_TOKENS}
        prompt = tuple(draw.choices(_TOKENS, k=length + draw.randrange(20)))
        return cls(prompt, sampling, draw.choice(adapters))

    def begun(self) -> "ComparedRequest":
        """Return a request with the first half of the prompt, for the prefix cache."""
        return replace(self, prompt=self.prompt[: len(self.prompt) // 2 + 1])

    def next_turn(self, answer: Sequence[int], draw: Random) -> "ComparedRequest":
        """Return a request that continues a response."""
        return replace(self, prompt=(*self.prompt, *answer, *draw.choices(_TOKENS, k=9)))


@dataclass(frozen=True, slots=True)
class ComparedResponse:
    """A response.

    Attributes:
        bits: bits of all log-probabilities, with their tokens.
        invariant: its fingerprint is that of a batch-invariant response.
    """

    token_ids: tuple[int, ...]
    bits: bytes
    cached_tokens: int
    invariant: bool

    def difference(self, other: "ComparedResponse") -> str:
        """Name the first difference. Empty: all bits are equal."""
        if self.token_ids != other.token_ids:
            pairs = enumerate(zip(self.token_ids, other.token_ids, strict=False))
            first = next((i for i, (own, others) in pairs if own != others), "the end")
            return f"tokens from {first} on"
        return "log-probabilities" if self.bits != other.bits else ""


async def respond(
    cluster: Cluster, request: ComparedRequest, on_token: Callable[[int], None] = lambda count: None
) -> ComparedResponse:
    """Send a request and return its response.

    Args:
        on_token: called at each message with the number of tokens.
    """
    tokens: list[int] = []
    prompt, generated = bytearray(), [bytearray() for _ in range(3)]
    messages = cluster.stream(request.prompt, adapter=request.adapter, **request.sampling)
    async for message in messages:
        tokens += message.token_ids
        prompt += b"".join(_bits(message.prompt_logprobs))
        for column, bits in zip(generated, _bits(message.logprobs), strict=True):
            column += bits
        if tokens:
            on_token(len(tokens))
    return ComparedResponse(
        tuple(tokens),
        b"".join((prompt, *generated)),
        message.usage.cached_tokens,
        all(each.system_fingerprint.startswith("fp_invariant_") for each in message.versions),
    )


def _bits(logprobs: Logprobs) -> tuple[bytes, bytes, bytes]:
    return (
        array("f", logprobs.logprob).tobytes(),
        array("I", logprobs.top_token).tobytes(),
        array("f", logprobs.top_logprob).tobytes(),
    )

"""What crosses between a node's front and its engine thread: immutable, one record per kind.

The front keeps no books. A router stream is named by the front's own counter, so that the end
of one stream can never touch a request of another.
"""

from typing import TypeAlias

import msgspec

from common.sampling import SamplingParams

# Front to engine --------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """Sent once, first; taken by `run_engine`, the engine thread never sees it."""

    config: str  # the program's config record as JSON
    instance: int  # random 64 bit, drawn at each start of the node
    address: str  # of the front's gRPC server, for logs and peers


class SubmitRequest(msgspec.Struct, frozen=True, tag=True):
    stream: int
    request: int  # the router's number for it on that stream
    request_id: str
    token_ids: bytes  # little-endian int32
    num_generated: int
    sampling: SamplingParams
    prefill_addresses: tuple[str, ...]
    budget_s: float


class CancelSubmitted(msgspec.Struct, frozen=True, tag=True):
    stream: int
    request: int


class StreamEnded(msgspec.Struct, frozen=True, tag=True):
    """A router is gone: cancel what it submitted on this stream."""

    stream: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question of `Node`; answered by one Answer with the same number.

    what: "describe" | "drain" | "flush_cache" | "abort" (argument = request_id)
    """

    number: int
    what: str
    argument: str = ""


FrontMessage: TypeAlias = SubmitRequest | CancelSubmitted | StreamEnded | Ask

# Engine to front --------------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the pool is sized. Sent once, first.

    Shown by Describe; `reader` and `owner` Hellos are made of it too.
    """

    model: str
    fingerprint: dict[str, str]
    tokenizer_hash: str
    context_length: int
    num_pages: int


class Ended(msgspec.Struct, frozen=True):
    request: int
    reason: int  # FinishReason of decode.proto
    cached_tokens: int
    error: str = ""
    error_code: int = 0  # gRPC status code


class StepTokens(msgspec.Struct, frozen=True, tag=True):
    """What one step says to one router stream."""

    stream: int
    requests: bytes  # little-endian uint64, one per new token
    tokens: bytes  # little-endian uint32, same length
    ended: tuple[Ended, ...] = ()


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    error: str = ""  # NotIdle and the like; empty on success
    integer: int = 0  # pages freed, requests aborted
    description: dict[str, dict[str, int]] | None = None  # "pages", "queues", "counters"


class Moving(msgspec.Struct, frozen=True, tag=True):
    """Sent at least once a second while the loop turns, idle or not: the front's health."""

    steps: int
    gauges: dict[str, float]
    state: str  # "ready" | "draining"
    paired: tuple[str, ...]  # addresses of owners with a usable link
    links: tuple[tuple[str, str, float], ...]  # address, path, GiB/s
    expected_s: float = 0.0  # what the step under way is expected to take


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left to do; the front may end the node."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine's own fault, or a start that failed. The process ends after it."""

    reason: str
    config: bool = False  # the user's to mend: exit code 2


EngineMessage: TypeAlias = EngineReady | StepTokens | Answer | Moving | Drained | EngineFailed

"""The outcome of one request as the client saw it. All figures are computed from this record."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestOutcome:
    """Times are seconds from the start of the run.

    A chunk is an event of the stream that stands for at least one token.
    """

    group: str
    prompt_tokens: int  # as requested, then as the server's usage reports
    due: float  # scheduled sending time: latencies count from here
    sent: float  # actual sending time
    chunks: list[float] = field(default_factory=list)  # arrival times
    chunk_tokens: list[int] = field(default_factory=list)  # of each chunk, if reported
    output_tokens: int = 0  # by the server's usage; without it, the number of chunks
    cached_tokens: int = 0  # of the prompt, if the server reports them
    usage_reported: bool = False
    ended: float = 0.0
    error: str = ""  # kind of error, from a small set; "": success
    detail: str = ""  # error message of the server or the system

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def late(self) -> float:
        """Seconds between due and sent: a delay of the client, or of its limit of requests in
        flight."""
        return self.sent - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Seconds between neighbouring chunks, as a reader of the stream sees them."""
        return [b - a for a, b in pairwise(self.chunks)]

    @property
    def per_token(self) -> float | None:
        """Mean seconds of a token after the first chunk, or None if nothing came after it."""
        after = self.output_tokens - (self.chunk_tokens[0] if self.chunk_tokens else 1)
        if len(self.chunks) < 2 or after < 1:
            return None
        return (self.chunks[-1] - self.chunks[0]) / after

    def record(self) -> dict[str, Any]:
        """Return the JSON record: all fields, times rounded to microseconds."""
        times = {name: round(getattr(self, name), 6) for name in ("due", "sent", "ended")}
        return asdict(self) | times | {"chunks": [round(time, 6) for time in self.chunks]}

"""The outcome of one request as the client saw it. All figures are computed from this record."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
    usage_told: bool = False
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
        """Return the delay of sending in seconds.

        The client, or its limit of requests in flight, caused the delay. It never counts in the
        server's favour.
        """
        return self.sent - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Return the gaps between chunks, as a reader of the stream sees them."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Return the mean time per token after the first chunk, or None if nothing came after
        it."""
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        after = self.output_tokens - first
        if len(self.chunks) < 2 or after < 1:
            return None
        return (self.chunks[-1] - self.chunks[0]) / after

    def record(self) -> dict[str, Any]:
        """Return the JSON record: all fields, times in whole microseconds."""
        values = asdict(self)
        for name in ("due", "sent", "ended"):
            values[name] = round(values[name], 6)
        values["chunks"] = [round(time, 6) for time in self.chunks]
        return values

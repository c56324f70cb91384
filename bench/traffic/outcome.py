"""What a client saw of one request. The one record that everything here is computed from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """Times are seconds from the start of the run.

    A chunk is an event of the stream that stands for at least one token.
    """

    group: str
    prompt_tokens: int  # as asked for; as the server counted them, once it has told
    due: float  # when it was to be sent: latencies count from here
    sent: float  # when it was
    chunks: list[float] = field(default_factory=list)  # when each came
    chunk_tokens: list[int] = field(default_factory=list)  # in each, from servers that tell
    output_tokens: int = 0  # by the server's usage; without it, the number of chunks
    cached_tokens: int = 0  # of the prompt, from servers that tell
    usage_told: bool = False
    ended: float = 0.0
    error: str = ""  # its kind, from a small set; "": it was answered
    detail: str = ""  # what the server or the system said of it

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def late(self) -> float:
        """How long after it was due it was sent: the client's fault, or its bound on requests in
        flight; never the server's merit."""
        return self.sent - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Between chunks, as a reader of the stream sees them."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Mean time per token after the first chunk; None if nothing came after it."""
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        after = self.output_tokens - first
        if len(self.chunks) < 2 or after < 1:
            return None
        return (self.chunks[-1] - self.chunks[0]) / after

    def record(self) -> dict[str, Any]:
        """For JSON: everything, times to the microsecond."""
        values = asdict(self)
        for name in ("due", "sent", "ended"):
            values[name] = round(values[name], 6)
        values["chunks"] = [round(time, 6) for time in self.chunks]
        return values

"""Interface of a tracer for services, which hold a `Tracer | None`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from common.tracing.context import TraceContext

Attributes: TypeAlias = Mapping[str, str | int | float]

FLUSH_S = 2.0  # for waiting spans, at the end of the process


class ChildSpan(NamedTuple):
    """A span inside another one. Times are time.monotonic()."""

    name: str
    start: float
    end: float
    attributes: Attributes


class Tracer(Protocol):
    """Creates spans. For one thread. Only `close` waits for the collector."""

    def enter(self, parent: str, *, root: bool = False) -> TraceContext:
        """Return the trace of an arriving request, with its span's id if it is sampled.

        Args:
            parent: a checked header, or empty.
            root: start a trace if there is no parent, for the configured share of requests.
        """
        ...

    def tell(
        self,
        trace: TraceContext,
        name: str,
        *,
        begun: float,
        ended: float,
        children: Sequence[ChildSpan],
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Send an ended span with its children. Times are time.monotonic().

        Spans that the collector does not accept in time are dropped.

        Args:
            trace: from `enter`. Without `own`, the span gets a new id.
            name: of the span.
            begun: start of the span.
            ended: end of the span.
            children: spans inside it.
            attributes: of the span.
            error: message of a failure, or "".
        """
        ...

    def close(self) -> None:
        """Send waiting spans, for at most FLUSH_S. Called last."""
        ...

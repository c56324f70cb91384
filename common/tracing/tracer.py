"""What makes spans, to those who serve: they keep a `Tracer | None` and ask nothing more than
whether it is None."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from common.tracing.context import Trace

Attributes: TypeAlias = Mapping[str, str | int | float]

FLUSH_S = 2.0  # for spans that wait at the end of the program


class Child(NamedTuple):
    """A span inside another one. Moments are time.monotonic()."""

    name: str
    start: float
    end: float
    attributes: Attributes


class Tracer(Protocol):
    """For one thread. No call waits for the collector but `close`."""

    def enter(self, parent: str, *, root: bool = False) -> Trace:
        """Names the span of a request that arrives, if it is to have one.

        Args:
            parent: a checked header, or empty.
            root: begin a trace where there is no parent, for the configured share of requests.
        """
        ...

    def tell(
        self,
        trace: Trace,
        name: str,
        *,
        begun: float,
        ended: float,
        children: Sequence[Child],
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """One span, and those inside it, of what is over. Moments are time.monotonic(). What the
        collector does not take in time is dropped.

        Args:
            trace: as `enter` gave it; without `own` the span gets a name of its own.
        """
        ...

    def close(self) -> None:
        """Sends what waits, for FLUSH_S at the most. Called last."""
        ...

"""Traces: spans made from timelines when a request has ended, for an OpenTelemetry collector.

Off unless an endpoint is configured; then, and only then, the library behind common/otlp.py is
loaded. Whoever serves keeps a `Tracer | None` and asks nothing more than whether it is None.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from common.config import FrontConfig
from common.trace_context import Trace

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


def start(front: FrontConfig, service: str, *, ratio: float = 1.0) -> Tracer | None:
    """
    Args:
        service: such as "baton-router".
        ratio: share of the requests without a parent that get a trace.
    """
    if front.otlp_endpoint is None:
        return None
    from common.otlp import OtlpTracer

    return OtlpTracer(front.otlp_endpoint, service, ratio)

"""W3C trace context of a request, and the Tracer interface.

The library behind otlp.py is loaded only if tracing is configured. Otherwise the tracer is None. An
invalid header is ignored, as the standard requires.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from common.config import ServerConfig

HEADER = "traceparent"
_MAX_CHARACTERS = 256
_FORM = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)


class SpanName(NamedTuple):
    """Identity of a span in headers and in other spans."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(header: str) -> SpanName | None:
    """Return the span of a traceparent header, or None if it is invalid."""
    match = _FORM.fullmatch(header) if len(header) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "00" and more:
        return None
    return SpanName(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


def checked(header: str) -> str:
    """Return the header in version 00, as this process forwards it. Empty if it is invalid."""
    if not header:
        return ""
    name = parse(header)
    return name.header if name else ""


def trace_id_of(header: str) -> str:
    """Return 32 hex digits, or "" without a trace. `header` must be checked."""
    return header[3:35]


def log_fields(header: str) -> dict[str, str]:
    """Return the log fields of a traced request. `header` must be checked."""
    return {"trace_id": trace_id_of(header)} if header else {}


def is_sampled(header: str) -> bool:
    """Return whether the trace is sampled. `header` must be checked."""
    return header.endswith("1")


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """A request's position in its trace, at one process. Both are checked headers, or empty."""

    parent: str = ""  # from the caller
    own: str = ""  # the span to create when the request ends, named in advance for other processes

    @property
    def passed_on(self) -> str:
        """Parent for the spans of the next process."""
        return self.own or self.parent

    @property
    def trace_id(self) -> str:
        return trace_id_of(self.passed_on)

    @property
    def log_fields(self) -> dict[str, str]:
        return log_fields(self.passed_on)


UNTRACED = TraceContext()
Attributes: TypeAlias = Mapping[str, str | int | float]
FLUSH_S = 2.0  # seconds to send waiting spans at the end of the process


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

    def record(
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
        """
        ...

    def close(self) -> None:
        """Send waiting spans, for at most FLUSH_S. Must be the last call."""
        ...


def start(server: ServerConfig, service: str, *, ratio: float = 1.0) -> Tracer | None:
    """Start the export of spans. Returns None if no endpoint is configured.

    Args:
        service: service name, such as "baton-router".
        ratio: share of requests without a parent that get a trace.
    """
    if server.otlp_endpoint is None:
        return None
    from common.tracing.otlp import OtlpTracer

    return OtlpTracer(server.otlp_endpoint, service, ratio)

"""W3C trace context: which trace a request belongs to, and what its next span hangs on.

Only the header is known here; what becomes of spans, common/tracing/ knows. A header that is
not one is ignored, as the standard asks: it never harms the request that brought it.
"""

import re
from typing import NamedTuple

import msgspec

HEADER = "traceparent"
_MAX_CHARACTERS = 256
_FORM = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)


class SpanName(NamedTuple):
    """One span, as anything else refers to it."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(header: str) -> SpanName | None:
    """What a traceparent header names; None if it is none."""
    match = _FORM.fullmatch(header) if len(header) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "00" and more:
        return None
    return SpanName(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


def checked(header: str) -> str:
    """The header as this program passes it on: version 00; empty if it is none."""
    if not header:
        return ""
    name = parse(header)
    return name.header if name else ""


def trace_id_of(header: str) -> str:
    """32 hex digits; empty without a trace. `header` has been checked."""
    return header[3:35]


def log_fields(header: str) -> dict[str, str]:
    """For the lines of a request that has a trace. `header` has been checked."""
    return {"trace_id": trace_id_of(header)} if header else {}


def is_sampled(header: str) -> bool:
    """`header` has been checked."""
    return header.endswith("1")


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """A request's place in its trace, on one program. Both are checked headers, or empty."""

    parent: str = ""  # what the caller named
    own: str = ""  # the span that is made here at the request's end, named ahead for others

    @property
    def passed_on(self) -> str:
        """What the next program hangs its span on."""
        return self.own or self.parent

    @property
    def trace_id(self) -> str:
        return trace_id_of(self.passed_on)

    @property
    def log_fields(self) -> dict[str, str]:
        return log_fields(self.passed_on)


UNTRACED = Trace()

"""OpenTelemetry's library as a Tracer: sends spans over OTLP/gRPC on a separate thread.

Imported only if an endpoint is configured. Headers, certificates and resource attributes come from
the library's usual OTEL_* variables.
"""

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from common.tracing.context import (
    FLUSH_S,
    UNTRACED,
    Attributes,
    ChildSpan,
    SpanName,
    TraceContext,
    parse,
)

log = logging.getLogger(__name__)

_EXPORTERS_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
EXPORT_S = 5.0  # seconds for one batch, including retries
MAX_WAITING = 4096  # spans; more are dropped
_BATCH = 256
_BATCH_DELAY_MS = 1000.0
_JOIN_S = 1.0  # seconds for an export in progress, after its channel is closed
_NUM_READINGS = 3  # readings of both clocks


class OtlpTracer:
    """A Tracer that exports over OTLP."""

    def __init__(self, endpoint: str, service: str, ratio: float) -> None:
        self._ratio = ratio
        self._names = _Names()
        self._exporter = _Exporter(endpoint)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # `enter` decides about sampling
            resource=Resource.create(
                {
                    SERVICE_NAME: service,
                    SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}",
                }
            ),
            shutdown_on_exit=False,
            id_generator=self._names,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_WAITING,
                schedule_delay_millis=_BATCH_DELAY_MS,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("baton")

    def enter(self, parent: str, *, root: bool = False) -> TraceContext:
        above = parse(parent)
        if above is None:
            if not root or random.random() >= self._ratio:
                return UNTRACED
            return TraceContext("", SpanName(_drawn(128), _drawn(64), sampled=True).header)
        own = SpanName(above.trace_id, _drawn(64), sampled=True).header if above.sampled else ""
        return TraceContext(parent, own)

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
        to_unix_ns = _to_unix_ns()

        def unix_ns(moment: float) -> int:
            return int(moment * 1e9) + to_unix_ns

        self._names.next = parse(trace.own)
        span = self._tracer.start_span(
            name,
            context=_below(parse(trace.parent)),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=unix_ns(begun),
        )
        inside = set_span_in_context(span, Context())
        for child in children:
            self._tracer.start_span(
                child.name,
                context=inside,
                attributes=child.attributes,
                start_time=unix_ns(child.start),
            ).end(unix_ns(child.end))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(unix_ns(ended))

    def close(self) -> None:
        # The library's own shutdown waits for half a minute.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            log.warning("spans dropped: the collector did not accept them within %.1f s", FLUSH_S)
            self._exporter.shutdown()
            ending.join(_JOIN_S)


def _to_unix_ns() -> int:
    """Return the difference from time.monotonic_ns() to time.time_ns().

    A busy machine may delay this thread between the two readings, so the fastest pair counts.
    """
    readings = []
    for _ in range(_NUM_READINGS):
        begun, unix, ended = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((ended - begun, unix - (begun + ended) // 2))
    return min(readings)[1]


class _Exporter(SpanExporter):
    """The library's exporter, which logs only the first failure and the recovery.

    The library itself logs every failed attempt.
    """

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._refused = False
        _EXPORTERS_LOG.addFilter(self._is_news)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if self._refused and result is SpanExportResult.SUCCESS:
            log.info("span export resumed")
        self._refused = result is not SpanExportResult.SUCCESS
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        self._exporter.shutdown()
        _EXPORTERS_LOG.removeFilter(self._is_news)

    def _is_news(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR and not self._refused


class _Names(IdGenerator):
    """Gives the next span the id that was sent to others, and other spans a new one."""

    def __init__(self) -> None:
        self.next: SpanName | None = None

    def generate_trace_id(self) -> int:
        return self.next.trace_id if self.next else _drawn(128)

    def generate_span_id(self) -> int:
        name, self.next = self.next, None
        return name.span_id if name else _drawn(64)


def _below(parent: SpanName | None) -> Context:
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    context = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(context), Context())


def _drawn(num_bits: int) -> int:
    """Return random bits, but never 0, which the standard excludes."""
    return random.getrandbits(num_bits) or 1

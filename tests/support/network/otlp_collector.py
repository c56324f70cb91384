"""An OpenTelemetry collector that stores the spans it receives over OTLP/gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A received span. Times are Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool

    def encloses(self, other: "Span", slack_ns: int = 0) -> bool:
        return self.start - slack_ns <= other.start <= other.end <= self.end + slack_ns


@dataclass(slots=True)
class Collector(TraceServiceServicer):  # type: ignore[misc]
    spans: list[Span] = field(default_factory=list)
    port: int = 0
    # Status codes of the next export attempts.
    refusals: Iterator[grpc.StatusCode] = field(default_factory=lambda: iter(()))
    _asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def asked(self) -> None:
        """Wait for the next export attempt."""
        async with asyncio.timeout(60.0):
            await self._asked.acquire()

    async def Export(
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        self._asked.release()
        if (code := next(self.refusals, None)) is not None:
            await context.abort(code, "not now")
        for of_resource in request.resource_spans:
            service = _attributes(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_span(service, span) for span in of_scope.spans]
        return ExportTraceServiceResponse()


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    server, collector = grpc.aio.server(), Collector()
    add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)

"""Start of tracing, if it is configured. Only then is the library of otlp.py loaded."""

from common.config import ServerConfig
from common.tracing.tracer import Tracer


def start(front: ServerConfig, service: str, *, ratio: float = 1.0) -> Tracer | None:
    """Start the export of spans. Returns None if no endpoint is configured.

    Args:
        front: configuration with the endpoint.
        service: such as "baton-router".
        ratio: share of requests without a parent that get a trace.
    """
    if front.otlp_endpoint is None:
        return None
    from common.tracing.otlp import OtlpTracer

    return OtlpTracer(front.otlp_endpoint, service, ratio)

"""Begins to send spans, if anybody wants them: the library behind otlp.py is loaded then and only
then."""

from common.config import FrontConfig
from common.tracing.tracer import Tracer


def start(front: FrontConfig, service: str, *, ratio: float = 1.0) -> Tracer | None:
    """
    Args:
        service: such as "baton-router".
        ratio: share of the requests without a parent that get a trace.
    """
    if front.otlp_endpoint is None:
        return None
    from common.tracing.otlp import OtlpTracer

    return OtlpTracer(front.otlp_endpoint, service, ratio)

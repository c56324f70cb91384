"""All Prometheus metrics of all programs: base units, closed labels, prefix baton_.

No global registry: each program makes its own object and serves it. docs/metrics.md lists them.
"""

from common.metrics.node import NodeMetrics, Refusal, Role
from common.metrics.router import RouterMetrics
from common.metrics.serving import served

__all__ = ["NodeMetrics", "Refusal", "Role", "RouterMetrics", "served"]

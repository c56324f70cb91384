"""Metrics of every process: the process itself, failed authentication, certificate expiry."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from common import VERSION
from common.identity.guard import REASONS, SIDES, Reason, Side
from common.metrics.declared import counter, gauge

Purpose = Literal["shown", "authority", "shown_to_nodes", "authority_of_nodes"]
REFUSED = counter(
    "baton_peer_auth_rejected",
    "Total failed authentications between processes, by reason. caller: this process "
    "rejected a caller. callee: this process rejected the process that answered its call.",
    side=SIDES,
    reason=REASONS,
)
CERTIFICATE_END = gauge(
    "baton_certificate_end_timestamp_seconds",
    "Unix time of expiry: of the first certificate to expire in a chain, or of the last one in a "
    "file of authorities. shown: --tls-cert. authority: --tls-ca. shown_to_nodes: --node-tls.cert. "
    "authority_of_nodes: --node-tls.ca.",
    purpose=get_args(Purpose),
    sparse=True,
    together="least",
)
TRUST = (REFUSED, CERTIFICATE_END)


class TrustMetrics:
    """Authentication metrics. Written by the event loop, read by the scraping thread."""

    def __init__(self) -> None:
        self._refused = REFUSED.numbers()
        self._ends: dict[Purpose, Callable[[], float | None]] = {}

    def refused(self, side: Side, reason: Reason) -> None:
        self._refused[side, reason] += 1

    def certificate_ends(self, purpose: Purpose, end: Callable[[], float | None]) -> None:
        """Set the source of an expiry as Unix time. It is called on the scraping thread.

        It returns None if there is no such certificate.
        """
        self._ends[purpose] = end

    def families(self) -> Iterable[Metric]:
        ends = {purpose: end() for purpose, end in self._ends.items()}
        yield REFUSED.family(self._refused)
        yield CERTIFICATE_END.family(
            {(purpose,): end for purpose, end in ends.items() if end is not None}
        )


ROLES = ("router", "prefill", "decode", "encode", "planner")
INFO = gauge(
    "baton_info",
    "Always 1. The labels have the version of Baton and the role of the process.",
    version=(VERSION,),
    role=ROLES,
    sparse=True,
    together="most",
)
# Over worker processes: the latest start, and the process nearest to its descriptor limit.
PROCESS = (
    counter("process_cpu_seconds", "Total user and system CPU time spent in seconds."),
    gauge("process_resident_memory_bytes", "Resident memory size in bytes."),
    gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."),
    gauge(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        together="most",
    ),
    gauge("process_open_fds", "Number of open file descriptors.", together="most"),
    gauge("process_max_fds", "Maximum number of open file descriptors.", together="least"),
)


class MetricFamilies(Collector):
    """Creates metric families at each scrape, on the scraping thread."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def registry_of(
    role: Callable[[], str], families: Callable[[], Iterable[Metric]]
) -> CollectorRegistry:
    """Return the registry of a process: `families`, and the metrics of every process.

    Args:
        role: returns one of ROLES. Called at each scrape.
        families: called at each scrape, on the scraping thread.
    """
    # Without additional series for creation times.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(MetricFamilies(lambda: [INFO.family({(VERSION, role()): 1.0})]))
    registry.register(MetricFamilies(families))
    return registry

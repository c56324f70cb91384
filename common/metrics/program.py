"""What every program tells about itself, under the usual names where there are any."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from common.metrics.declared import Declared
from common.version import VERSION

ROLES = ("router", "prefill", "decode", "planner")

INFO = Declared(
    "baton_info",
    "gauge",
    "Always 1. The labels have the version of Baton and the role of the process.",
    {"version": (VERSION,), "role": ROLES},
    sparse=True,
    together="most",
)
# Of several processes: the last start, and the one that is nearest to its limit of descriptors.
PROCESS = (
    Declared("process_cpu_seconds", "counter", "Total user and system CPU time spent in seconds."),
    Declared("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    Declared("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    Declared(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        together="most",
    ),
    Declared("process_open_fds", "gauge", "Number of open file descriptors.", together="most"),
    Declared(
        "process_max_fds", "gauge", "Maximum number of open file descriptors.", together="least"
    ),
)


class Families(Collector):
    """Made anew at each scrape, on the thread that scrapes."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def registry_of(
    role: Callable[[], str], families: Callable[[], Iterable[Metric]]
) -> CollectorRegistry:
    """What a program serves: `families`, and what there is to say of any program.

    Args:
        role: gives one of ROLES, at each scrape.
        families: called at each scrape, on the thread that scrapes.
    """
    # No second series for each one, with the time of its making.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Families(lambda: [INFO.family({(VERSION, role()): 1.0})]))
    registry.register(Families(families))
    return registry

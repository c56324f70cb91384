"""All Prometheus metrics of all programs. Base units, closed labels, prefix baton_.

No global registry: each program makes its own object and serves it. What a node's engine counts
arrives as a snapshot and is read from it at the scrape, so that nothing is counted twice.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import ConfigError

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 10.0)

# What a node's engine counts, under its own names: (metric, help).
_TOTALS = {
    "prompt_tokens": ("baton_prompt_tokens", "Prompt tokens of requests admitted."),
    "cached_tokens": ("baton_cached_tokens", "Prompt tokens whose KV was found in a cache."),
    "generated_tokens": ("baton_generated_tokens", "Tokens sampled on this node."),
    "finished": ("baton_finished_requests", "Requests that have left this node's engine."),
    "deadlines": ("baton_deadlines", "Requests whose total budget was spent."),
    "retractions": ("baton_retractions", "Requests taken off the device for want of pages."),
    "recomputed": ("baton_recomputed", "Retracted requests whose KV was computed anew."),
    "handoffs_opened": ("baton_handoffs_opened", "Attempts at hand-offs begun as a reader."),
    "pages_read": ("baton_kv_pages_read", "KV pages that came from owners and were held."),
    "local_prefills": ("baton_local_prefills", "Prompts that a decode node prefilled itself."),
}
_HANDOFF = "handoffs_"  # of any other such counter the rest of the name is the outcome
_HOST_PAGES = "host_pages"


@contextlib.contextmanager
def served(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[int | None]:
    """Serves a registry over HTTP on a thread of its own while inside.

    Args:
        port: None serves nothing; 0 leaves the choice to the system.
    Returns:
        The port.
    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)


class NodeMetrics:
    """Metrics of a prefill or decode node's front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineSnapshot()
        self.registry.register(self._engine)
        self._refused = Counter(
            "baton_rejected",
            "Submissions that the front refused before the engine saw them.",
            ["reason"],  # invalid | draining | overloaded
            registry=self.registry,
        )
        self._streams = Gauge(
            "baton_streams",
            "Open streams.",
            ["kind"],  # router | pair
            registry=self.registry,
        )
        self._pairings = Counter(
            "baton_pairings",
            "Ends of attempts to pair.",
            ["outcome"],  # up | refused | failed
            registry=self.registry,
        )
        self._cut_off = Counter(
            "baton_streams_cut_off",
            "Streams ended because the other side did not read.",
            registry=self.registry,
        )

    def engine_moved(
        self, steps: int, gauges: Mapping[str, float], links: Sequence[tuple[str, str, float]]
    ) -> None:
        """Takes the engine's latest snapshot.

        Args:
            gauges: queue_NAME and pages_HOLDER, and total_NAME for what only grows.
            links: owner's address, path, GiB/s.
        """
        self._engine.steps, self._engine.gauges, self._engine.links = steps, gauges, links

    def refused(self, reason: str) -> None:
        """reason: "invalid", "draining" or "overloaded"."""
        self._refused.labels(reason).inc()

    def stream_opened(self, kind: str) -> None:
        """kind: "router" or "pair"."""
        self._streams.labels(kind).inc()

    def stream_closed(self, kind: str) -> None:
        self._streams.labels(kind).dec()

    def pairing(self, outcome: str) -> None:
        """outcome: "up", "refused" or "failed"."""
        self._pairings.labels(outcome).inc()

    def cut_off(self) -> None:
        self._cut_off.inc()


class _EngineSnapshot(Collector):
    """The engine's last snapshot, as metric families. Read on the HTTP server's thread."""

    def __init__(self) -> None:
        self.steps = 0
        self.gauges: Mapping[str, float] = {}
        self.links: Sequence[tuple[str, str, float]] = ()

    def collect(self) -> Iterable[Metric]:
        steps = CounterMetricFamily("baton_steps", "Forwards launched since the start.")
        steps.add_metric([], self.steps)
        pages = GaugeMetricFamily(
            "baton_kv_pages", "KV pages that this kind of holder has.", labels=["holder"]
        )
        queues = GaugeMetricFamily(
            "baton_queue_requests",
            "Requests in each queue of the engine; on_device: in the chunk or the running batch.",
            labels=["queue"],
        )
        handoffs = CounterMetricFamily(
            "baton_handoffs", "Hand-offs by how they ended.", labels=["outcome"]
        )
        yield steps
        for name, value in self.gauges.items():
            kind, _, rest = name.partition("_")
            if kind == "pages":
                pages.add_metric([rest], value)
            elif name == _HOST_PAGES:
                yield GaugeMetricFamily(
                    "baton_host_kv_pages", "Host pages that retracted requests fill.", value
                )
            elif kind == "queue":
                queues.add_metric([rest], value)
            elif rest in _TOTALS:
                yield CounterMetricFamily(*_TOTALS[rest], value)
            elif rest.startswith(_HANDOFF):
                handoffs.add_metric([rest.removeprefix(_HANDOFF)], value)
        yield from (pages, queues, handoffs, *self._links())

    def _links(self) -> Iterable[Metric]:
        # By path and not by peer: addresses are no closed set. Describe tells each link.
        count = GaugeMetricFamily("baton_links", "Usable links.", labels=["path"])
        slowest = GaugeMetricFamily(
            "baton_slowest_link_bytes_per_second",
            "Speed, when it was proved, of the slowest link of each path.",
            labels=["path"],
        )
        speeds: dict[str, list[float]] = {}
        for _, path, gib_per_s in self.links:
            speeds.setdefault(path, []).append(gib_per_s * 2**30)
        for path, of_path in speeds.items():
            count.add_metric([path], len(of_path))
            slowest.add_metric([path], min(of_path))
        return count, slowest


class RouterMetrics:
    """Metrics of a router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "baton_requests",
            "Requests by how they ended.",
            ["outcome"],  # stop | length | cancelled | error
            registry=self.registry,
        )
        self._rejected = Counter(
            "baton_rejected",
            "Requests refused before any node saw them.",
            ["reason"],  # invalid | overloaded | no_node
            registry=self.registry,
        )
        self._live = Gauge("baton_live_requests", "Requests under way.", registry=self.registry)
        self._tokens = Counter(
            "baton_generated_tokens", "Tokens written to clients.", registry=self.registry
        )
        self._first_token = Histogram(
            "baton_time_to_first_token_seconds",
            "Router accepts the request -> router writes the first token.",
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self._next_token = Histogram(
            "baton_inter_token_latency_seconds",
            "Token arrives at the router -> the request's next token arrives.",
            buckets=_ITL_S,
            registry=self.registry,
        )
        self._http_connections = Gauge(
            "baton_http_connections", "Open connections of HTTP clients.", registry=self.registry
        )
        self._http_answers = Counter(
            "baton_http_answers",
            "HTTP requests answered to their end.",
            ["status"],
            registry=self.registry,
        )

    def accepted(self) -> None:
        self._live.inc()

    def ended(self, outcome: str) -> None:
        """An accepted request's end. outcome: "stop", "length", "cancelled" or "error"."""
        self._live.dec()
        self._ended.labels(outcome).inc()

    def rejected(self, reason: str) -> None:
        """reason: "invalid", "overloaded" or "no_node"."""
        self._rejected.labels(reason).inc()

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next_token.observe(seconds)

    def tokens(self, num_tokens: int) -> None:
        self._tokens.inc(num_tokens)

    def http_connections(self, number: int) -> None:
        self._http_connections.set(number)

    def http_answered(self, status: int) -> None:
        self._http_answers.labels(status).inc()

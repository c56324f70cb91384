"""Metrics of a router, and the requests of the last minute as clients see them."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from common.distribution import HistogramCounts, LiveHistogram
from common.metrics.declared import MetricValues, counter, gauge, histogram
from common.metrics.program import INFO, PROCESS, TRUST, TrustMetrics, registry_of
from common.requests.timeline import TtftPhase

WINDOW_S = 60.0
SAMPLE_S = 2.0


class RequestCounts(NamedTuple):
    """Counts of requests, cumulative or in a window.

    Attributes:
        rejected: requests that got status 429.
        failed: accepted requests that ended with an error, and requests that no node could accept.
        ttft: counts per bucket of time to first token, with the bounds `LATENCY_S`, as `itl`.
    """

    rejected: int
    failed: int
    ttft: HistogramCounts
    itl: HistogramCounts

    def plus(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            self.rejected + other.rejected,
            self.failed + other.failed,
            self.ttft.plus(other.ttft),
            self.itl.plus(other.itl),
        )

    def minus(self, earlier: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            self.rejected - earlier.rejected,
            self.failed - earlier.failed,
            self.ttft.minus(earlier.ttft),
            self.itl.minus(earlier.itl),
        )


class RecentRequests:
    """Request counts of the last minute in one process, from samples of cumulative counts.

    `run` takes the samples. For one event loop.
    """

    def __init__(
        self, counts: Callable[[], RequestCounts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._clock = clock
        self._samples = deque([(clock(), counts())], maxlen=int(WINDOW_S / SAMPLE_S))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        self._samples.append((self._clock(), self._counts()))

    def now(self) -> tuple[float, RequestCounts]:
        """Return the length of the window in seconds, and the counts in it."""
        began, earlier = self._samples[0]
        return self._clock() - began, self._counts().minus(earlier)


Rejection = Literal["invalid", "overloaded", "late", "limited", "no_node"]
RejectionReason = Literal["no_key", "unknown_key", "expired_key", "no_operator", "host"]

NODE_STATES = ("ready", "paused", "unhealthy", "draining", "starting", "unreachable")
_OTHER = "other"
# Status codes that the router itself returns.
_STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "413", "415", "421"),
    *("429", "499", "500", "503", "504"),
)

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TTFT_PHASE_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, *_TTFT_S)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 10.0)
# Bucket bounds for percentiles, at most 10 % apart. They include the bounds of both exported
# histograms.
LATENCY_S = tuple(sorted({*_TTFT_S, *_ITL_S, *(0.0001 * 1.1**step for step in range(157))}))
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

REQUESTS = counter(
    "baton_requests",
    "Total accepted requests by result. stop: the model or a stop string ended the response. "
    "length: max_tokens ended it. pooled: a result without tokens, such as an embedding. "
    "cancelled: by the client. invalid: a node rejected a value, such as a schema. overloaded: a "
    "node rejected it, because it could not start in time. error: any other error.",
    outcome=("stop", "length", "pooled", "cancelled", "invalid", "overloaded", "error"),
)
REJECTED = counter(
    "baton_requests_rejected",
    "Total requests that the router rejected before they reached a node. invalid: a wrong "
    "value. overloaded: the router has its maximum of requests. late: no node could start it "
    "within its wait limit. limited: a rate limit or quota. no_node: no node was usable.",
    reason=get_args(Rejection),
)
WAITING = gauge(
    "baton_waiting_requests", "Current requests that wait for one of the router's slots."
)
AUTH_REJECTED = counter(
    "baton_auth_rejected",
    "Total calls rejected for their API key or host name. no_key: the key is missing. "
    "unknown_key: the key does not exist. expired_key: the key has expired. no_operator: the "
    "call needs an operator's key. host: the host name in the call is not allowed.",
    reason=get_args(RejectionReason),
)
KEY_REQUESTS = counter(
    "baton_api_key_requests",
    "Total requests of each API key in the present file. accepted: served. limited: rejected "
    "by a rate limit.",
    key=(),
    outcome=("accepted", "limited"),
    sparse=True,
)
KEY_TOKENS = counter(
    "baton_api_key_tokens",
    "Total tokens of each API key in the present file.",
    key=(),
    kind=("prompt", "generated"),
    sparse=True,
)
LIVE = gauge("baton_inflight_requests", "Current accepted requests that have not ended.")
PROMPT_TOKENS = counter("baton_accepted_prompt_tokens", "Total prompt tokens of accepted requests.")
TOKENS = counter("baton_generated_tokens", "Total tokens written to clients.")
FIRST_TOKEN = histogram(
    "baton_time_to_first_token_seconds",
    "TTFT: seconds from accepting a request to writing its first token.",
    _TTFT_S,
)
TTFT_PHASE = histogram(
    "baton_ttft_phase_seconds",
    "Seconds of TTFT in each phase. The phases of a request add up to its TTFT.",
    _TTFT_PHASE_S,
    phase=tuple(phase.label for phase in TtftPhase),
)
NEXT_TOKEN = histogram(
    "baton_inter_token_latency_seconds",
    "ITL: seconds between two writes of a request's tokens, divided by the number of tokens "
    "in the second write.",
    _ITL_S,
)
REQUEST_SECONDS = histogram(
    "baton_request_seconds",
    "Seconds from receiving an accepted request to its end.",
    _REQUEST_S,
)
READY = gauge(
    "baton_ready",
    "1 while a request could be placed on a node, else 0.",
    together="least",
)
PROCESSES = gauge(
    "baton_router_processes",
    "Current processes of this router. answering: it answered this scrape in time. silent: "
    "it did not.",
    state=("answering", "silent"),
)
NODES = gauge(
    "baton_nodes",
    "Current nodes that this router knows, by role and last reported state.",
    kind=("prefill", "decode", "encode"),
    state=NODE_STATES,
    together="most",
)
STREAMS_LOST = counter(
    "baton_decode_streams_lost",
    "Total streams to decode nodes that broke, except to draining nodes. All requests on "
    "such a stream are replayed or fail.",
)
REPLAYS = counter(
    "baton_requests_replayed",
    "Total requests that continued on another decode node after a failure.",
)
MOVES = counter(
    "baton_migrations",
    "Total live migrations of running requests to another decode node, by result.",
    outcome=("completed", "failed"),
)
QUARANTINED = counter(
    "baton_requests_quarantined",
    "Total requests that were replayed alone, because an engine crashed while it served them.",
)
HTTP_CONNECTIONS = gauge("baton_http_connections", "Current open connections of HTTP clients.")
HTTP_ANSWERS = counter(
    "baton_http_responses", "Total completed HTTP responses.", status=(*_STATUSES, _OTHER)
)

# Metrics of requests and nodes. With several models, they have the label `model`.
BY_MODEL = (
    REQUESTS,
    REJECTED,
    WAITING,
    LIVE,
    PROMPT_TOKENS,
    TOKENS,
    FIRST_TOKEN,
    TTFT_PHASE,
    NEXT_TOKEN,
    REQUEST_SECONDS,
    READY,
    NODES,
    STREAMS_LOST,
    REPLAYS,
    MOVES,
    QUARANTINED,
)

DECLARED = (
    *BY_MODEL,
    AUTH_REJECTED,
    KEY_REQUESTS,
    KEY_TOKENS,
    PROCESSES,
    HTTP_CONNECTIONS,
    HTTP_ANSWERS,
    *TRUST,
    INFO,
    *PROCESS,
)


class ReportedNode(Protocol):
    """A node as it was reported last."""

    @property
    def role(self) -> str: ...

    @property
    def state(self) -> str: ...


class ApiKeyMetrics(NamedTuple):
    """Counts of one API key."""

    num_requests: int
    num_limited: int
    num_prompt_tokens: int
    num_generated_tokens: int


class RouterMetrics:
    """Metrics of a router. Written by its event loop, read by the scraping thread."""

    def __init__(self) -> None:
        values = self._values = MetricValues()
        self._ended = values.numbers(REQUESTS)
        self._rejected = values.numbers(REJECTED)
        self._auth_rejected = values.numbers(AUTH_REJECTED)
        self._num_waiting: Callable[[], int] = lambda: 0
        self._keys: Callable[[], Mapping[str, ApiKeyMetrics]] = dict
        self._live = values.numbers(LIVE)
        self._prompt_tokens = values.numbers(PROMPT_TOKENS)
        self._tokens = values.numbers(TOKENS)
        self._first_token = LiveHistogram(LATENCY_S)
        self._ttft_phases = values.distributions(TTFT_PHASE)
        self._next_token = LiveHistogram(LATENCY_S)
        self._request_seconds = values.distributions(REQUEST_SECONDS)
        self._ready = values.numbers(READY)
        self._nodes = values.numbers(NODES)
        self._streams_lost = values.numbers(STREAMS_LOST)
        self._replays = values.numbers(REPLAYS)
        self._moves = values.numbers(MOVES)
        self._quarantined = values.numbers(QUARANTINED)
        self._http_connections = values.numbers(HTTP_CONNECTIONS)
        self._http_answers = values.numbers(HTTP_ANSWERS)
        self.trust = TrustMetrics()
        self.registry = registry_of(lambda: "router", self.families)

    def families(self) -> Iterable[Metric]:
        yield from self._values.families()
        yield FIRST_TOKEN.family({(): self._first_token.counted().coarser(_TTFT_S)})
        yield NEXT_TOKEN.family({(): self._next_token.counted().coarser(_ITL_S)})
        yield WAITING.family({(): float(self._num_waiting())})
        yield PROCESSES.family({("answering",): 1.0})
        yield from self._of_keys()
        yield from self.trust.families()

    def _of_keys(self) -> Iterable[Metric]:
        requests: dict[tuple[str, ...], float] = {}
        tokens: dict[tuple[str, ...], float] = {}
        for key, counted in self._keys().items():
            requests[key, "accepted"] = counted.num_requests
            requests[key, "limited"] = counted.num_limited
            tokens[key, "prompt"] = counted.num_prompt_tokens
            tokens[key, "generated"] = counted.num_generated_tokens
        return KEY_REQUESTS.family(requests), KEY_TOKENS.family(tokens)

    def waiting_from(self, num_waiting: Callable[[], int]) -> None:
        """Set the source of the queue length. The scraping thread calls it at each scrape."""
        self._num_waiting = num_waiting

    def keys_from(self, keys: Callable[[], Mapping[str, ApiKeyMetrics]]) -> None:
        """Set the source of the counts by key name. The scraping thread calls it at each scrape."""
        self._keys = keys

    def auth_rejected(self, reason: RejectionReason) -> None:
        self._auth_rejected[reason,] += 1

    def accepted(self, num_prompt_tokens: int) -> None:
        self._live[()] += 1
        self._prompt_tokens[()] += num_prompt_tokens

    def ended(self, outcome: str, seconds: float) -> None:
        """Count the end of an accepted request.

        Args:
            outcome: a label value of `baton_requests_total`.
            seconds: time since its arrival.
        """
        self._live[()] -= 1
        self._ended[outcome,] += 1
        self._request_seconds[()].add(seconds)

    def rejected(self, reason: Rejection) -> None:
        self._rejected[reason,] += 1

    def request_counts(self) -> RequestCounts:
        overloaded = ("overloaded", "late", "limited")  # status 429
        return RequestCounts(
            rejected=int(
                sum(self._rejected[reason,] for reason in overloaded) + self._ended["overloaded",]
            ),
            failed=int(self._ended["error",] + self._rejected["no_node",]),
            ttft=self._first_token.counted(),
            itl=self._next_token.counted(),
        )

    def first_token(self, seconds: float) -> None:
        self._first_token.add(seconds)

    def ttft_split(self, seconds: Sequence[float]) -> None:
        """Record the time to first token in seconds, split by TtftPhase in its order."""
        for distribution, each in zip(self._ttft_phases.values(), seconds, strict=True):
            distribution.add(each)

    def next_token(self, seconds: float, times: int = 1) -> None:
        """Record `times` inter-token latencies of `seconds` each."""
        self._next_token.add(seconds, times)

    def tokens(self, num_tokens: int) -> None:
        self._tokens[()] += num_tokens

    def ready(self, ready: bool) -> None:
        self._ready[()] = float(ready)

    def nodes(self, reports: Iterable[ReportedNode]) -> None:
        """Replace the numbers of nodes by kind and state."""
        numbers = Counter((report.role, report.state) for report in reports)
        for kind, state in self._nodes:
            self._nodes[kind, state] = numbers[kind, state]

    def stream_lost(self) -> None:
        self._streams_lost[()] += 1

    def replayed(self, *, quarantined: bool) -> None:
        """Count a replay after the loss of a decode node. `quarantined`: the request runs alone."""
        self._replays[()] += 1
        self._quarantined[()] += quarantined

    def moved(self, *, moved: bool) -> None:
        """Count a live migration that completed (`moved`) or failed."""
        self._moves["completed" if moved else "failed",] += 1

    def http_connections(self, number: int) -> None:
        self._http_connections[()] = number

    def http_answered(self, status: int) -> None:
        series = (str(status),)
        self._http_answers[series if series in self._http_answers else (_OTHER,)] += 1


def registry_of_models(
    shared: RouterMetrics, models: Mapping[str, RouterMetrics]
) -> CollectorRegistry:
    """Return the registry of a router with several models.

    Args:
        shared: metrics that belong to no model. It also counts requests rejected before their model
            was known, with an empty label.
        models: metrics of each model by name.
    """
    names = {each.name for each in BY_MODEL}

    def families() -> Iterable[Metric]:
        merged = {family.name: family for family in shared.families()}
        for name in names:
            before = merged[name].samples if name == REJECTED.name else []
            merged[name].samples = _labelled(before, "")
        for model, metrics in models.items():
            for family in metrics.families():
                if family.name in names:
                    merged[family.name].samples += _labelled(family.samples, model)
        return merged.values()

    return registry_of(lambda: "router", families)


def _labelled(samples: Iterable[Sample], model: str) -> list[Sample]:
    return [each._replace(labels={"model": model, **each.labels}) for each in samples]

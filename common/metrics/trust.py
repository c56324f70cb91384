"""Metrics of failed authentication and of certificate expiry, for all processes."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client.core import Metric

from common.identity.refusals import REASONS, SIDES, Reason, Side
from common.metrics.declared import MetricDeclaration

Purpose = Literal["shown", "authority", "shown_to_nodes", "authority_of_nodes"]

REFUSED = MetricDeclaration(
    "baton_peer_auth_rejected",
    "counter",
    "Total failed authentications between processes: rejected callers, and callees of this "
    "process's calls, by reason.",
    {"side": SIDES, "reason": REASONS},
)
CERTIFICATE_END = MetricDeclaration(
    "baton_certificate_end_timestamp_seconds",
    "gauge",
    "Unix time at which certificates in use expire: the first one of a chain that this process "
    "shows, or the last authority that verifies others.",
    {"purpose": get_args(Purpose)},
    sparse=True,
    together="least",
)
TRUST = (REFUSED, CERTIFICATE_END)


class TrustMetrics:
    """Authentication metrics. Written by the event loop, read on the thread that scrapes."""

    def __init__(self) -> None:
        self._refused = REFUSED.numbers()
        self._ends: dict[Purpose, Callable[[], float | None]] = {}

    def refused(self, side: Side, reason: Reason) -> None:
        self._refused[side, reason] += 1

    def certificate_ends(self, purpose: Purpose, end: Callable[[], float | None]) -> None:
        """Set the source of an expiry as Unix time, called on the thread that scrapes.

        None: there is no such certificate.
        """
        self._ends[purpose] = end

    def families(self) -> Iterable[Metric]:
        ends = {purpose: end() for purpose, end in self._ends.items()}
        yield REFUSED.family(self._refused)
        yield CERTIFICATE_END.family(
            {(purpose,): end for purpose, end in ends.items() if end is not None}
        )

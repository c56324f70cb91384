"""Whom a program does not believe, and until when its certificates are good: alike for all."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client.core import Metric

from common.identity.refusals import REASONS, SIDES, Reason, Side
from common.metrics.declared import Declared

Purpose = Literal["shown", "authority", "shown_to_nodes", "authority_of_nodes"]

REFUSED = Declared(
    "baton_identity_refused",
    "counter",
    "Callers that were not let in, and callees of this program's own calls that were not believed, "
    "by why.",
    {"side": SIDES, "reason": REASONS},
)
CERTIFICATE_END = Declared(
    "baton_certificate_end_timestamp_seconds",
    "gauge",
    "Unix time at which certificates in use are over: the first of a chain that is shown, the last "
    "of the authorities that others are checked by.",
    {"purpose": get_args(Purpose)},
    sparse=True,
    together="least",
)
TRUST = (REFUSED, CERTIFICATE_END)


class TrustMetrics:
    """Written by the event loop, told on the thread that scrapes."""

    def __init__(self) -> None:
        self._refused = REFUSED.numbers()
        self._ends: dict[Purpose, Callable[[], float | None]] = {}

    def refused(self, side: Side, reason: Reason) -> None:
        self._refused[side, reason] += 1

    def certificate_ends(self, purpose: Purpose, end: Callable[[], float | None]) -> None:
        """Names whoever knows the Unix time; called on the thread that scrapes. None: there is no
        such certificate."""
        self._ends[purpose] = end

    def families(self) -> Iterable[Metric]:
        ends = {purpose: end() for purpose, end in self._ends.items()}
        yield REFUSED.family(self._refused)
        yield CERTIFICATE_END.family(
            {(purpose,): end for purpose, end in ends.items() if end is not None}
        )

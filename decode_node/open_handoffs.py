"""List of all open hand-offs of a decode node, for finding stuck requests."""

import time
from collections.abc import Iterable

from decode_node.queues import GrantedHandoff, HandoffAttempt
from decode_node.unpaired import UnpairedEntry


def open_handoffs(
    unpaired: Iterable[UnpairedEntry],
    prealloc: Iterable[HandoffAttempt],
    transfer: Iterable[GrantedHandoff],
) -> list[dict[str, object]]:
    """Return the log fields of each hand-off: its queue, its request and its progress."""
    now = time.monotonic()
    told: list[dict[str, object]] = [
        {"queue": "unpaired", "request_id": each.request.spec.request_id} for each in unpaired
    ]
    told += [{"queue": "prealloc", **_of(attempt, now)} for attempt in prealloc]
    told += [
        {
            "queue": "transfer",
            **_of(each.attempt, now),
            "first_token": each.first_token is not None,
            "held": each.held,
        }
        for each in transfer
    ]
    return told


def _of(attempt: HandoffAttempt, now: float) -> dict[str, object]:
    return {
        "request_id": attempt.request.spec.request_id,
        "id": tuple(attempt.id),
        "owner": attempt.stamps.prefill,
        "pages": attempt.num_pages,
        "open_s": now - attempt.opened,
    }

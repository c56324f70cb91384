"""Measure a hand-off of KV pages: on the wire, on each engine thread, and for the client.

    python -m tools.bench.handoff                        all parts, about three minutes
    python -m tools.bench.handoff --parts rates          page reads between two processes
    python -m tools.bench.handoff --parts cost           CPU on the engine threads
    python -m tools.bench.handoff --parts exposure       transfer time that clients notice
    python -m tools.bench.handoff --parts consumers      a separate agent for each consumer

Goals: one descriptor per page; at least 95 % of the bare rate of each path; at most 100 us of CPU
per hand-off and side on the engine thread (1k tokens, 64 pages, one chunk).
"""

from collections.abc import Callable
from typing import Any

from tools.bench.handoff import consumer_agents, exposure, rates, role_cost
from tools.bench.support.record import emit, parsed, say

# The measurement of each part, which prints its tables and returns its rows and results.
PARTS: dict[str, Callable[[Any], tuple[list[dict[str, Any]], dict[str, Any]]]] = {
    "rates": lambda options: rates.measure(options.rounds),
    "cost": lambda options: role_cost.measure(options.handoffs),
    "exposure": lambda options: exposure.measure(options.prompts),
    "consumers": lambda options: consumer_agents.measure(options.pool_gib, options.consumers),
}


def main() -> None:
    options = parsed(
        "handoff",
        __doc__,
        ("--parts", PARTS, "parts to run"),
        ("--rounds", 15, "rates: samples per row"),
        ("--handoffs", 1000, "cost: hand-offs per row"),
        ("--prompts", 6, "exposure: prompts per system"),
        ("--pool-gib", 1.0, "consumers: the producer's pool"),
        ("--consumers", 32, "consumers: at once"),
    )
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for part in options.parts:
        say(f"\n{part}")
        measured, results[part] = PARTS[part](options)
        rows += [{"part": part, **row} for row in measured]
    emit("handoff", vars(options), rows, results=results)


if __name__ == "__main__":
    main()

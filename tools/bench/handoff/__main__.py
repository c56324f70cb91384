"""Measure a hand-off of KV pages: on the wire, on each engine thread, and for the client.

    python -m tools.bench.handoff                        all parts, about three minutes
    python -m tools.bench.handoff --parts rates          page reads between two processes
    python -m tools.bench.handoff --parts cost           CPU on the engine threads
    python -m tools.bench.handoff --parts exposure       transfer time that clients notice
    python -m tools.bench.handoff --parts consumers      a separate agent for each consumer
    python -m tools.bench.handoff --parts ranks          page reads between nodes of several ranks

Goals: one descriptor per page; at least 95 % of the bare rate of each path; at most 100 us of CPU
per hand-off and side on the engine thread (1k tokens, 64 pages, one chunk); at least 85 % of the
rate of one rank between different numbers of ranks, from 64 pages on.
"""

import argparse
from typing import Any

import uvloop

from tools.bench.handoff import consumer_agents, exposure, ranks, rates, role_cost
from tools.bench.support.record import emit, say, table

PARTS = ("rates", "cost", "exposure", "consumers", "ranks")
GOAL_CPU_US = 100.0

RATE_COLUMNS = {
    "pages": "{pages}",
    "GiB/s memcpy": "{gib_per_s[memcpy]:.2f}",
    "bare nixl": "{gib_per_s[bare nixl]:.2f}",
    "nixl": "{gib_per_s[nixl]:.2f}",
    "of bare": "{nixl_of_bare:.0%}",
    "bare socket": "{gib_per_s[bare socket]:.2f}",
    "tcp": "{gib_per_s[tcp]:.2f}",
    "of bare ": "{tcp_of_bare:.0%}",
    "tls": "{gib_per_s[tls]:.2f}",
    "CPU s per GiB, tcp": "{cpu_s_per_gib[tcp]:.2f}",
    "tls ": "{cpu_s_per_gib[tls]:.2f}",
    "descriptors": "{nixl_descriptors}",
    "post us": "{nixl_post_us:.1f}",
}
COST_COLUMNS = {
    "side": "{side}",
    "cache": "{cache}",
    "tokens": "{tokens}",
    "descriptors": "{descriptors}",
    "CPU us p50": "{cpu_us[p50]:.0f}",
    "p90": "{cpu_us[p90]:.0f}",
    "p99": "{cpu_us[p99]:.0f}",
    "stages, us p50": "{stages}",
}
WATCHED_COLUMNS = {
    "chunks": "{chunks}",
    "path": "{path}",
    "KV MiB": "{kv_mib}",
    "admitted to first token, ms": "{admitted_to_first_token_ms[p50]:.1f}",
    "first token to all landed, ms p50": "{exposed_ms[p50]:.2f}",
    "p90": "{exposed_ms[p90]:.2f}",
}
SEEN_COLUMNS = {
    "who": "{who}",
    "TTFT ms p50": "{ttft_ms[p50]:.1f}",
    "p90": "{ttft_ms[p90]:.1f}",
    "one page: TTFT ms p50": "{one_page_ttft_ms[p50]:.1f}",
    "p90 ": "{one_page_ttft_ms[p90]:.1f}",
    "second token ms later": "{second_token_ms[p50]:.1f}",
}
CONSUMER_COLUMNS = {
    "path": "{path}",
    "pool GiB": "{pool_gib:g}",
    "consumers": "{consumers}",
    "made, ms p50": "{made_ms[p50]:.1f}",
    "p90": "{made_ms[p90]:.1f}",
    "ended, ms": "{ended_ms:.1f}",
    "of each: KiB": "{memory_kib}",
    "KiB pinned": "{pinned_kib}",
    "descriptors": "{descriptors}",
    "mappings": "{mappings}",
}

RANK_COLUMNS = {
    "ranks": "{ranks}",
    "path": "{path}",
    "pages": "{pages}",
    "GiB/s": "{gib_per_s:.2f}",
    "of one rank": "{of_one_rank:.0%}",
}


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for part in options.parts:
        say(f"\n{part}")
        match part:
            case "rates":
                measured, results[part] = _read(options)
            case "cost":
                measured, results[part] = _cost(options)
            case "exposure":
                measured, results[part] = _exposed(options)
            case "consumers":
                measured = consumer_agents.measure(
                    consumer_agents.Plan(
                        options.page_kib << 10, options.pool_gib, options.consumers
                    )
                )
                table(measured, CONSUMER_COLUMNS)
            case "ranks":
                measured, results[part] = _ranks(options)
        rows += [{"part": part, **row} for row in measured]
    emit("handoff", vars(options), rows, results=results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.handoff", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--page-kib", type=int, default=64, help="rates, consumers")
    parser.add_argument("--rounds", type=int, default=15, help="rates, ranks: samples per row")
    parser.add_argument(
        "--pool-gib", type=float, default=1.0, help="consumers: the producer's pool"
    )
    parser.add_argument("--consumers", type=int, default=32, help="consumers: at once")
    parser.add_argument("--handoffs", type=int, default=1000, help="cost: hand-offs per row")
    parser.add_argument("--tokens", type=int, default=1024, help="cost: tokens of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="exposure")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="exposure")
    parser.add_argument("--prompts", type=int, default=6, help="exposure: prompts per system")
    parser.add_argument(
        "--path", choices=("auto", "nixl", "tcp"), default="auto", help="exposure, ranks"
    )
    return parser.parse_args()


def _read(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows, results = rates.measure(rates.Plan(options.page_kib << 10, options.rounds))
    table(rows, RATE_COLUMNS)
    say(f"at least {rates.GOAL:.0%} of the bare rate for every number: {results['met_everywhere']}")
    return rows, results


def _ranks(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    names = ("nixl", "tcp") if options.path == "auto" else (options.path,)
    rows: list[dict[str, Any]] = []
    results = {}
    for name in names:
        measured, results[name] = ranks.measure(ranks.Plan(name, options.rounds))
        table(measured, RANK_COLUMNS)
        say(f"{name}: {results[name]}")
        rows += measured
    return rows, results


def _cost(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    few = max(1, options.handoffs // 20)
    loads = [
        role_cost.Load(options.handoffs, options.tokens, pool_handoffs=pool)
        for pool in (options.handoffs + role_cost.WARM_UP, few)
    ]
    sides = (role_cost.producer, role_cost.consumer, role_cost.plain)
    rows = [side(load) for side in sides for load in loads]
    stages = (
        "; ".join(f"{name} {us:.0f}" for name, us in row["stages_us"].items()) for row in rows
    )
    table([{**row, "stages": text} for row, text in zip(rows, stages, strict=True)], COST_COLUMNS)
    worst = {row["side"]: row["cpu_us"]["p50"] for row in rows if row["cache"] == "full"}
    own = round(worst["producer"] - worst["plain prefill"], 1)
    say(f"CPU us p50 with a full cache (goal {GOAL_CPU_US:g} per hand-off and side): {worst}")
    say(f"producer, beyond what scheduling a prefill costs anyway: {own}")
    return rows, {"goal_us": GOAL_CPU_US, "cpu_us_p50": worst, "producer_beyond_prefill_us": own}


def _exposed(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    plan = exposure.Plan(options.prompt_tokens, options.chunk_tokens, options.prompts, options.path)
    rows, together = uvloop.run(exposure.measure(plan))
    table([row for row in rows if "exposed_ms" in row], WATCHED_COLUMNS)
    table([row for row in rows if "ttft_ms" in row], SEEN_COLUMNS)
    say(f"{together}")
    return rows, together


if __name__ == "__main__":
    main()

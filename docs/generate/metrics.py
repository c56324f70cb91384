"""docs/metrics.md, from what the programs declare. `python -m docs.generate.metrics` writes it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.metrics import node, planner, router
from common.metrics.declared import Declared
from common.metrics.program import INFO, PROCESS

FILE = Path(__file__).parents[1] / "metrics.md"
_HEAD = """# Metrics

Every program serves Prometheus metrics on `--metrics-port`, and a router also under `/metrics` of
its HTTP port. A router with several `--processes` is one program to whoever scrapes it: either port
tells what all of them count, [as one](#several-router-processes).

Units are base units, and what labels can say is a closed list: no addresses, no request ids; of
`key` it is the names in the file of `--api-keys`, as it is now. A series is there from the start,
with 0, so that the first failure is an increase too; those marked *sparse* are there once there is
something to say.

Counters end with `_total`. Of a histogram there are `_bucket`, `_sum` and `_count`.

A node's engine reports to its front twice a second, and between two steps: a value is as old as
that, or as the step under way is long.

Nodes do not say in each series which role they have: that is for the scraper, as the component
`monitoring` for Kubernetes does it. Elsewhere start from `deploy/prometheus`, which has a scrape
configuration, and the alert rules as a plain file beside it:

```yaml
scrape_configs:
  - job_name: baton
    static_configs:
      - {targets: ["router.example:9050"], labels: {namespace: baton, role: router}}
      - {targets: ["prefill.example:9100"], labels: {namespace: baton, role: prefill}}
      - {targets: ["decode.example:9200"], labels: {namespace: baton, role: decode}}
```

`namespace` is what alerts and dashboards tell clusters apart by, `instance` what they tell programs
apart by: a pod's name in Kubernetes, elsewhere the address scraped. Dashboards are in
`deploy/kubernetes/components/monitoring`; [the runbook](runbook.md) says what to do about each
alert. Each has a link to its section there, on a site of your own: `python -m docs.generate.rules
--site https://HOST/PATH` says where you keep what `make docs` builds.

## Several router processes

Counters and histograms are sums. They never fall: what a process had told stays in the sum while it
is silent and after its end; what it counted between the last scrape and its end is lost. Gauges are
sums too (`baton_live_requests`), but for what all of them see or share: of `baton_nodes` and
`process_start_time_seconds` the most is told, of `baton_ready` and the ends of certificates the
least, of open descriptors the most and of their limit the least. CPU time and memory are those of
all, with the process that keeps them.

A scrape asks every process and waits 2 s at most. `baton_router_processes{state="silent"}` counts
those that did not answer: of them there are no gauges.

This page is made from `common/metrics/` by `python -m docs.generate.metrics`.
"""


def page() -> str:
    common = (INFO, *PROCESS)
    parts = [_HEAD]
    for title, declared in (
        ("Router", [each for each in router.DECLARED if each not in common]),
        ("Prefill and decode nodes", node.BOTH),
        ("Prefill nodes alone", node.PREFILL),
        ("Decode nodes alone", node.DECODE),
        ("Planner", [each for each in planner.DECLARED if each not in common]),
        ("Every program", common),
    ):
        parts += _table(title, declared)
    return "".join(parts)


def _table(title: str, declared: Sequence[Declared]) -> Iterator[str]:
    yield f"\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n"
    for each in declared:
        name = each.name + ("_total" if each.kind == "counter" else "")
        about = each.help + (" *Sparse.*" if each.sparse else "")
        yield f"| `{name}` | {each.kind} | {_labels(each)} | {_escaped(about)} |\n"


def _labels(declared: Declared) -> str:
    return "; ".join(f"{name}: {_values(values)}" for name, values in declared.labels.items())


def _values(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values) or "*of the file*"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("->", "→")


if __name__ == "__main__":
    FILE.write_text(page())

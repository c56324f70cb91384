"""Generate docs/metrics.md from the declared metrics.

`python -m docs.generate.metrics` writes the page.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cli.planner import metrics as planner
from common.metrics.declared import MetricDeclaration
from common.metrics.program import INFO, PROCESS
from node import metrics as node
from router import metrics as router

FILE = Path(__file__).parents[1] / "metrics.md"
_HEAD = """# Metrics

Every process with `--metrics-port` serves Prometheus metrics on that port, without a key. A router
also serves them under `/metrics` of its HTTP port, to [operators](clients.md#permissions). Use them
for dashboards, alerts and capacity planning.

```sh
curl -s http://127.0.0.1:8000/metrics | grep ^baton_
```

## Scrape configuration

On Kubernetes, use the component `monitoring`. Elsewhere, start from `deploy/prometheus`. It has a
scrape configuration and the alert rules as a plain file. List every process in the `targets` of its
role. The scrape configuration adds the label `role`, which the series of nodes lack:

```yaml
scrape_configs:
  - job_name: baton
    static_configs:
      - {targets: ["router.example:9050"], labels: {namespace: baton, role: router}}
      - {targets: ["prefill.example:9100"], labels: {namespace: baton, role: prefill}}
      - {targets: ["decode.example:9200"], labels: {namespace: baton, role: decode}}
```

| label | meaning |
|---|---|
| `namespace` | identifies the cluster in alerts and dashboards |
| `instance` | identifies the process: the pod's name in Kubernetes, elsewhere the scraped address |
| `role` | `router`, `prefill`, `decode` or `planner` |

Dashboards are in `deploy/kubernetes/components/monitoring`. [The runbook](runbook.md) has a section
for each alert, and each alert links to its section. To link to a site of your own, which has the
output of `make docs`, run `python -m docs.generate.rules --site https://HOST/PATH`.

## Conventions

- Units are base units. Counters end with `_total`. A histogram has `_bucket`, `_sum` and `_count`.
- Label values are a fixed list, without addresses or request ids. The values of `key` are the names
  in the present file of `--api-keys`.
- A series exists from the start with the value 0, so the first failure is an increase. Series
  marked *sparse* appear with their first value.
- A node's engine reports to its server process twice a second, between two steps. A value is
  therefore at most as old as that, or as the running step is long.

## Several router processes

A router with several `--processes` is one scrape target. Either port returns the metrics of all
processes.

| type | value |
|---|---|
| counters, histograms | the sum, including the last values of silent and ended processes |
| gauges | the sum (such as `baton_inflight_requests`), except for the following |
| `baton_nodes`, `process_start_time_seconds`, open descriptors | the maximum |
| `baton_ready`, ends of certificates, limit of descriptors | the minimum |
| CPU time, memory | the sum, including the parent process |

Sums of counters never fall. Events between the last scrape and the end of a process are lost.

A scrape asks every process and waits at most 2 s. `baton_router_processes{state="silent"}` counts
the processes that did not answer. Their gauges are missing.

The following tables are generated from `common/metrics/` by `python -m docs.generate.metrics`.
"""


def page() -> str:
    common = (INFO, *PROCESS)
    parts = [_HEAD]
    for title, declared in (
        ("Router", [each for each in router.DECLARED if each not in common]),
        ("Prefill and decode nodes", node.BOTH),
        ("Prefill nodes only", node.PREFILL),
        ("Decode nodes only", node.DECODE),
        ("Planner", [each for each in planner.DECLARED if each not in common]),
        ("All processes", common),
    ):
        parts += _table(title, declared)
    return "".join(parts)


def _table(title: str, declared: Sequence[MetricDeclaration]) -> Iterator[str]:
    yield f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
    for each in declared:
        name = each.name + ("_total" if each.kind == "counter" else "")
        about = each.help + (" *Sparse.*" if each.sparse else "")
        yield f"| `{name}` | {each.kind} | {_labels(each)} | {_escaped(about)} |\n"


def _labels(declared: MetricDeclaration) -> str:
    return "<br>".join(f"{name}: {_values(values)}" for name, values in declared.labels.items())


def _values(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values) or "*names in the file*"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page())

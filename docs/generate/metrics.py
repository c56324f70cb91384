"""Generate docs/metrics.md from the declared metrics.

`python -m docs.generate.metrics` writes the page.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.planner import metrics as planner
from common.metrics.declared import MetricDeclaration
from common.metrics.program import INFO, PROCESS
from node import metrics as node
from router import metrics as router

FILE = Path(__file__).parents[1] / "metrics.md"
_LISTED = 32  # values of a label
_EXPLAINED = ("path", "queue")  # labels whose values the head of the page explains
_HEAD = """# Metrics

Use these Prometheus metrics for dashboards, alerts and capacity planning. Every process with
`--metrics-port` serves them on that port, without a key. A router also serves them under `/metrics`
of its HTTP port, where [operators](clients.md#permissions) may need a key.

```sh
curl -s http://127.0.0.1:8000/metrics | grep ^baton_
```

## Scrape configuration

On Kubernetes, use the component `monitoring`. Elsewhere, use the files in `deploy/prometheus`: a
scrape configuration and the alert rules. In the scrape configuration, list every process with its
role. The label `role` is necessary, because the nodes do not add it to their metrics:

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
| `namespace` | the cluster, for alerts and dashboards |
| `instance` | the process: the name of its pod in Kubernetes, elsewhere the scraped address |
| `role` | `router`, `prefill`, `decode`, `encode` or `planner` |

Grafana dashboards are in `deploy/kubernetes/components/monitoring`. Each alert links to its section
of [the runbook](runbook.md). If you publish your own copy of this documentation (the output of
`make docs`), run `python -m docs.generate.rules --site https://HOST/PATH`, so that the alerts link
to your copy.

## Conventions

- **Units** are base units, such as seconds and bytes. Counters end with `_total`. A histogram has
  `_bucket`, `_sum` and `_count`.
- **Data paths.** The label `path` is the data path of a link: `nvlink`, `cuda_ipc`, `rdma`, `cma`
  or `tcp`.
- **Labels** have fixed values, without addresses or request ids. The exception is `key`, whose
  values are the names in the current file of `--api-keys`.
- **Series** exist from the start with the value 0, so that the first failure is visible as an
  increase. Series marked *sparse* appear only with their first value.
- **Age.** A node's engine reports its values twice a second, but not during a step. Values are
  therefore half a second old at most, or as old as the running step.

## Several models

If a router serves [several models](multi-model.md), series marked *by model* also have the label
`model`, the name that clients use.

## Several router processes

If a router has several `--processes`, each of its metrics ports returns the metrics of all
processes together:

| metrics | value |
|---|---|
| counters, histograms | the sum, with the last values of ended and silent processes |
| other gauges, such as `baton_inflight_requests` | the sum |
| `baton_nodes`, `process_start_time_seconds`, open file descriptors | the maximum |
| `baton_ready`, expiry of certificates, limit of file descriptors | the minimum |
| CPU time, memory | the sum, including the parent process |

A scrape waits at most 2 s for the processes. `baton_router_processes{state="silent"}` counts
processes that did not respond. Their gauges are missing in this scrape. Sums of counters never
decrease, but events between the last scrape and the end of a process are not counted.

## Queues

The label `queue` of `baton_queue_requests` has these values:

| nodes | queue | requests |
|---|---|---|
| prefill and decode | `waiting` | wait for the computation of their prompt |
| prefill and decode | `chunked` | have a prompt that is partly computed |
| prefill and decode | `on_device` | are in the current chunk or in the running batch |
| prefill and decode | `grammar` | wait for the compilation of their grammar |
| prefill and decode | `adapter` | wait for a slot for their LoRA adapter |
| prefill and decode | `offload_load` | wait for their prefix from an [offload tier](tiers.md) |
| prefill and decode | `fetching` | wait until their prefix has been read from another node |
| prefill | `embeddings` | wait until an encode node has encoded their images |
| prefill | `bootstrap` | wait until the decode node has pages for them |
| prefill | `inflight` | have been computed. A decode node reads their pages |
| prefill | `pooled` | are calls for embeddings or scores |
| decode | `paused` | wait for the end of a [pause](pauses.md) |
| decode | `unpaired` | wait for a prefill node that was just lost |
| decode | `prealloc` | wait for pages on this node |
| decode | `transfer` | have pages. A prefill node computes their KV, and this node reads it |
| decode | `retracted` | had to release their pages on the device, and continue later |
| decode | `migrating` | are about to leave in a [live migration](moves.md) |

`python -m docs.generate.metrics` generates the following tables from the code.
"""


def page() -> str:
    common = (INFO, *PROCESS)
    parts = [_HEAD]
    for title, declared in (
        ("Router", [each for each in router.DECLARED if each not in common]),
        ("Prefill and decode nodes", node.BOTH),
        ("Prefill nodes only", node.PREFILL),
        ("Decode nodes only", node.DECODE),
        ("Encode nodes only", node.ENCODE),
        ("Planner", [each for each in planner.DECLARED if each not in common]),
        ("All processes", common),
    ):
        parts += _table(title, declared)
    return "".join(parts)


def _table(title: str, declared: Sequence[MetricDeclaration]) -> Iterator[str]:
    yield f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
    for each in declared:
        name = each.name + ("_total" if each.kind == "counter" else "")
        kind = each.kind + (", sparse" if each.sparse else "")
        kind += ", by model" if each in router.BY_MODEL else ""
        about = _escaped(_with_values(each))
        yield f"| `{name}` | {kind} | {_labels(each) or '-'} | {about} |\n"


def _with_values(declared: MetricDeclaration) -> str:
    """Return the help text with each explained label value in a line of its own."""
    values = sorted({value for each in declared.labels.values() for value in each}, key=len)
    explained = re.compile(rf"(?<=[.] )({'|'.join(map(re.escape, reversed(values)))})(?=: )")
    return explained.sub(r"<br> `\1`", declared.help) if values else declared.help


def _labels(declared: MetricDeclaration) -> str:
    shown = []
    for name, values in declared.labels.items():
        is_explained = name in _EXPLAINED or (
            values and all(f". {value}: " in declared.help for value in values)
        )
        shown.append(f"`{name}`" if is_explained else f"`{name}`: {_values(values)}")
    return "<br>".join(shown)


def _values(values: Sequence[str]) -> str:
    if len(values) > _LISTED:
        return f"`{values[0]}` to `{values[-1]}`"
    return ", ".join(f"`{value}`" for value in values) or "*names in the file*"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page())

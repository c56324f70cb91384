"""Generate the tables of docs/metrics.md from the declared metrics.

`python -m docs.generate.metrics` replaces the end of the page, from the first table on.
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
_EXPLAINED = ("path", "queue")  # labels whose values the page explains
# The sentence before the generated tables.
_MARK = "`python -m docs.generate.metrics` generates the following tables from the code.\n"


def page() -> str:
    """Return the page as it is, with the tables of the current metrics."""
    common = (INFO, *PROCESS)
    parts = [FILE.read_text().partition(_MARK)[0], _MARK]
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

"""Goals of the GPU engine, and whether a run reaches them. Reads rows and measures nothing."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tools.bench.gpu.process import Row


class Goal(NamedTuple):
    """A share of 1: the field `share` or `idle` of the first row whose fields are as in `where`.

    Attributes:
        where: allowed values by field. "part" and "table" name the table.
    """

    what: str
    where: Mapping[str, Collection[object]]
    at_least: float | None = None
    at_most: float | None = None

    def verdict(self, rows: Iterable[Row]) -> dict[str, Any]:
        """Return the goal and whether it is met. measured: None without such a row."""
        field = "share" if self.at_most is None else "idle"
        values = (
            row[field]
            for row in rows
            if all(row.get(name) in allowed for name, allowed in self.where.items())
        )
        value = next(values, None)
        met = value is not None and (
            value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)
        )
        limits = {"at_least": self.at_least, "at_most": self.at_most}
        return {"goal": self.what, **limits, "measured": value, "met": met}


_LARGE = ("Llama-3-8B", "Qwen3-8B")
_STEP = {"part": ["decode"], "table": ["steps"], "model": _LARGE, "context": [1024],
         "graphs": [True], "overlap": [True], "early": [False]}  # fmt: skip
GOALS = (
    Goal(
        "decode attention at batch 64 and 8k tokens, share of the read bandwidth",
        {"part": ["attention"], "table": ["decode"], "shape": ["64 x 8192, 32/8x128"]},
        at_least=0.85,
    ),
    *(
        Goal(
            f"decode step of an 8B model at batch {batch}, share of the roofline",
            {**_STEP, "batch": [batch]},
            at_least=0.80,
        )
        for batch in (1, 64)
    ),
    Goal(
        "prefill of 8k tokens by an 8B model, share of the matmul ceiling",
        {"part": ["prefill"], "table": ["prompts"], "model": _LARGE, "tokens": [8192]},
        at_least=0.65,
    ),
    Goal(
        "GPU idle between decode steps with overlap, 8B model at batch 64",
        {"table": ["timeline"], "model": _LARGE, "batch": [64], "overlap": [True]},
        at_most=0.02,
    ),
)


def reached(rows: Collection[Row]) -> list[dict[str, Any]]:
    """Return one entry per goal. `rows` are those of all parts, with the field "part"."""
    return [goal.verdict(rows) for goal in GOALS]

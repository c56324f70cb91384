"""Goals of the GPU engine, and whether a run reaches them. Reads rows and measures nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tools.bench.gpu.frame import Row


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: at_least or at_most a share of 1, in the first row of `part` that `fits`."""

    what: str
    part: str
    fits: Callable[[Row], bool]
    value: str
    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most


def _step(batch: int) -> Callable[[Row], bool]:
    return lambda row: (
        row["table"] == "steps"
        and row["model"].endswith("8B")
        and (row["batch"], row["context"]) == (batch, 1024)
        and row["graphs"]
        and row["overlap"]
        and not row["early"]
    )


GOALS = (
    Goal(
        "decode attention at batch 64 and 8k tokens, share of the read bandwidth",
        "attention",
        lambda row: (
            row["table"] == "decode"
            and row["case"] == "decode 64 x 8192"
            and row["heads"] == "32/8x128"
        ),
        "share",
        at_least=0.85,
    ),
    *(
        Goal(
            f"decode step of an 8B model at batch {batch}, share of the roofline",
            "decode",
            _step(batch),
            "share",
            at_least=0.80,
        )
        for batch in (1, 64)
    ),
    Goal(
        "prefill of 8k tokens by an 8B model, share of the matmul ceiling",
        "prefill",
        lambda row: (
            row["table"] == "prompts" and row["model"].endswith("8B") and row["tokens"] == 8192
        ),
        "share",
        at_least=0.65,
    ),
    Goal(
        "GPU idle between decode steps with overlap, 8B model at batch 64",
        "decode",
        lambda row: (
            row["table"] == "timeline"
            and row["model"].endswith("8B")
            and row["batch"] == 64
            and row["overlap"]
        ),
        "idle",
        at_most=0.02,
    ),
)


def reached(rows: Iterable[tuple[str, Row]]) -> list[dict[str, Any]]:
    """Return one entry per goal. measured: None if no (part name, row) of the run matches."""
    given = list(rows)
    found = []
    for goal in GOALS:
        values = (row[goal.value] for part, row in given if part == goal.part and goal.fits(row))
        value = next(values, None)
        found.append(
            {
                "goal": goal.what,
                "at_least": goal.at_least,
                "at_most": goal.at_most,
                "measured": value,
                "met": value is not None and goal.met_by(value),
            }
        )
    return found

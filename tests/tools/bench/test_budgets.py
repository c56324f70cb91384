"""Recorded budgets of instructions of the kernels."""

from pathlib import Path

import pytest

from tools.bench.resources import budgets


def codes(instructions: int, loop: int = 0) -> budgets.Counts:
    return {"ptx": {"instructions": instructions, "loop": loop}}


@pytest.fixture(autouse=True)
def _a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "FILE", tmp_path / "instructions.json")
    budgets.write({"sm_80 a x": codes(1), "sm_90 a x": codes(2), "sm_90 b x": codes(3)}, ())


def test_budgets_of_kernels_that_were_not_compiled_stay() -> None:
    budgets.write({"sm_90 b x": codes(4), "sm_90 c x": codes(5)}, ())
    expected = {"sm_80 a x": 1, "sm_90 a x": 2, "sm_90 b x": 4, "sm_90 c x": 5}
    assert budgets.read() == {name: codes(count) for name, count in expected.items()}


def test_for_a_completely_compiled_architecture_no_other_budget_stays() -> None:
    budgets.write({"sm_90 b x": codes(4)}, [90])
    assert budgets.read() == {"sm_80 a x": codes(1), "sm_90 b x": codes(4)}


def test_the_budget_of_a_kernel_is_that_of_its_longest_variant() -> None:
    of = {"arch": 90, "kernel": "a", "variants": ["llama3-8b bfloat16 adapters"]}
    counts = (codes(300, 40), codes(320, 30), codes(310, 35))
    rows = [{**of, "codes": each} for each in counts]
    assert budgets.counted(rows) == {"sm_90 a adapters": codes(320, 40)}

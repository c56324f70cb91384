"""GPU resources of kernels, compiled ahead of time.

The compilation runs in separate processes, because this process's kernels are made for the
interpreter. The first test covers one model on one architecture with one page size, and a layer
whose kernels start early on all architectures. The nightly test covers all kernels that serving
launches, which takes a quarter of an hour.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A minute on two idle cores, and three for all kernels of serving.
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]

ODD = """
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from tools.bench.resources import budgets

from tools.bench.resources import variants

from tools.bench.resources import __main__ as resources


@triton.jit
def spilling_kernel(x_ptr, BLOCK: tl.constexpr):
    place = x_ptr + tl.arange(0, BLOCK)
    values = tl.load(place)
    tl.debug_barrier()
    tl.store(place, values / tl.sum(values))


@triton.jit
def large_kernel(x_ptr, out_ptr, num, SIZE: tl.constexpr):
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for start in tl.range(0, num, num_stages=8):
        tile = tl.load(x_ptr + (start * SIZE + row) * SIZE + col)
        total += tl.dot(tile, tile)
    tl.store(out_ptr + row * SIZE + col, total)


@triton.jit
def wrong_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 16), tl.arange(0, 32))


@triton.jit(do_not_specialize=["free"])
def counting_kernel(x_ptr, free, num):
    tl.store(x_ptr + free, num)


@triton.jit
def long_kernel(x_ptr):
    place = x_ptr + tl.arange(0, 256)
    tl.store(place, tl.sin(tl.load(place)))


def launch(count):
    x, wide = torch.empty(4096), torch.empty(1 << 20, dtype=torch.bfloat16)
    spilling_kernel[(1,)](x, 4096, num_warps=1, maxnreg=64, enable_fp_fusion=True)
    large_kernel[(1,)](wide, x, 8, 128, enable_fp_fusion=False)
    wrong_kernel[(1,)](x, enable_fp_fusion=True)
    counting_kernel[(1,)](x, count, count)


def launch_long(count):
    long_kernel[(1,)](torch.empty(256), enable_fp_fusion=True)


budgets.FILE = Path(__file__).with_name("budgets.json")
variants.serving = lambda arch: [
    variants.Variant("odd", launch),
    variants.Variant("llama3-8b bfloat16 short", launch_long),
    variants.Variant("llama3-8b bfloat16 new", launch_long),
]
if __name__ == "__main__":
    resources.main()
"""


def _run(
    *command: str, path: Path = ROOT, timeout_s: float = 2300.0
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{path}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout_s
    )


# On sm_90 what one model launches: with one size of pages, and of attention with and without early
# starts one. Also what parts of models launch, as ranks have them. Elsewhere, of the layer that
# starts early, the kernels that compile fast. Where blocks have the least shared memory and where
# programs have most heads, attention over latents, which wants most of it.
FEW = (
    "sm_90 llama3-8b (?!.*(fp8_| page (64|128|16 (decode|mixed) )))"
    "|sm_90 .*-tp[28] "
    "|sm_(80|100) .* early _(rope_and_store|add_rms_norm|act_and_mul)_"
    "|sm_(86|89|90|120) deepseek-v3 bfloat16 latents _(extend|split)_"
)
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


@pytest.fixture(scope="module")
def served() -> subprocess.CompletedProcess[str]:
    """Return the program's verdict on these few kernels. Launches of all models are checked."""
    return _run("-m", "tools.bench.resources", "--only", FEW)


def _rows(ran: subprocess.CompletedProcess[str], arch: int, *kernels: str) -> list[dict[str, Any]]:
    record = json.loads(ran.stdout.splitlines()[-1])
    rows = [row for row in record["rows"] if row["arch"] == arch and row["kernel"] in kernels]
    assert {row["kernel"] for row in rows} == set(kernels)
    return rows


def _assert_fits(ran: subprocess.CompletedProcess[str], *archs: int) -> None:
    assert ran.returncode == 0, ran.stderr[-3000:]
    record = json.loads(ran.stdout.splitlines()[-1])
    assert record["problems"] == []
    assert {row["arch"] for row in record["rows"]} == set(archs)


def test_every_kernel_that_a_model_launches_compiles_and_fits_its_gpu(
    served: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():  # to stderr: stdout of pytest's workers goes nowhere
        print(f"\n{served.stderr}", file=sys.stderr)
    _assert_fits(served, *ARCHITECTURES)


@pytest.mark.nightly
def test_every_kernel_that_serving_launches_compiles_and_fits_its_gpu() -> None:
    _assert_fits(_run("-m", "tools.bench.resources"), *ARCHITECTURES)


def test_the_records_of_both_releases_of_triton_have_the_same_kernels() -> None:
    folder = ROOT / "tools/bench/resources"
    newest, of_wheels = (
        json.loads((folder / f"instructions-{release}.json").read_text())
        for release in ("3.9", "3.7")
    )
    assert newest.keys() == of_wheels.keys()


def test_attention_uses_tensor_cores_and_copies_tiles_ahead(
    served: subprocess.CompletedProcess[str],
) -> None:
    for row in _rows(served, 90, "_split_kernel", "_extend_kernel"):
        assert row["cp_async"] > 0, row
        if "float32" not in row["variants"][0]:  # whose products are exact, by ordinary arithmetic
            few_queries = row["kernel"] == "_split_kernel" and row["wgmma"] == 0
            assert row["mma" if few_queries else "wgmma"] > 0, row


def test_memory_bound_kernels_access_sixteen_bytes_for_each_thread(
    served: subprocess.CompletedProcess[str],
) -> None:
    moving = (
        "_act_and_mul_kernel",
        "_add_rms_norm_kernel",
        "_embed_kernel",
        "_page_pack_kernel",
        "_rope_and_store_kernel",
    )
    for row in _rows(served, 90, *moving):
        assert {"ld 16", "st 16"} <= row["accesses"].keys(), row
        assert not {"ld 1", "ld 2", "st 1", "st 2"} & row["accesses"].keys(), row


def test_kernels_with_early_start_wait_for_the_previous_one_and_start_the_next(
    served: subprocess.CompletedProcess[str],
) -> None:
    rows = json.loads(served.stdout.splitlines()[-1])["rows"]
    fast = {"_rope_and_store", "_add_rms_norm", "_act_and_mul"}
    for arch, expected in ((80, set()), (90, {*fast, "_extend", "_split"}), (100, fast)):
        dependent = {
            row["kernel"].removesuffix("_kernel")
            for row in rows
            if row["arch"] == arch and row["dependent"] == 2
        }
        assert dependent == expected
        assert all(row["dependent"] in (0, 2) for row in rows)


def test_latents_have_as_many_stages_as_fit_into_shared_memory(
    served: subprocess.CompletedProcess[str],
) -> None:
    """99 KiB, for 36 KiB of keys and as much of queries."""
    for arch in (86, 89, 120):
        for row in _rows(served, arch, "_split_kernel", "_extend_kernel"):
            assert (row["stages"], row["shared_bytes"]) == (2, 75776)


def test_the_instructions_of_attention_are_limited(
    served: subprocess.CompletedProcess[str],
) -> None:
    """The tile has 128 queries and 128 keys, and no row maximum rises by much."""
    (row,) = (
        row
        for row in _rows(served, 90, "_extend_kernel")
        if "llama3-8b bfloat16 page 16 extend" in row["variants"]
    )
    assert row["codes"]["ptx"]["loop"] <= 610
    if "sass" in row["codes"]:
        assert row["codes"]["sass"]["loop"] <= 560


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Return the program's verdict on kernels that must not be served."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(ODD)
    few = {"instructions": 40, "loop": 0}
    budgets = {"sm_90 long_kernel short": {"sass": few, "ptx": few}}
    (folder / "budgets.json").write_text(json.dumps(budgets))
    return _run("-c", "import odd; odd.resources.main()", "--arch", "90", path=folder)


def _failures(ran: subprocess.CompletedProcess[str], kernel: str) -> list[str]:
    assert ran.returncode == 1, ran.stderr
    problems: list[str] = json.loads(ran.stdout.splitlines()[-1])["problems"]
    assert all(f"FAILED: {problem}" in ran.stderr for problem in problems)
    return [problem.removeprefix(kernel) for problem in problems if problem.startswith(kernel)]


@pytest.mark.parametrize(
    "kernel, problem",
    [
        ("spilling_kernel", r" on sm_90 \(odd\) spills .*"),
        ("large_kernel", r" on sm_90 \(odd\) wants 262144 bytes of shared memory of 232448"),
        ("wrong_kernel", r" on sm_90 \(odd\) does not compile: CompilationError.*"),
        ("_act_and_mul_kernel", " is launched by no variant"),
    ],
)
def test_a_kernel_that_must_not_be_served_fails_by_name(
    odd: subprocess.CompletedProcess[str], kernel: str, problem: str
) -> None:
    (found,) = _failures(odd, kernel)
    assert re.fullmatch(problem, found, re.DOTALL)


def test_a_kernel_that_is_recompiled_for_another_count_fails_by_name(
    odd: subprocess.CompletedProcess[str],
) -> None:
    problems = _failures(odd, "counting_kernel is compiled")
    assert any(" num " in problem for problem in problems)
    assert not any(" free " in problem for problem in problems)


def test_a_kernel_that_leaves_fusion_to_the_compilers_default_fails_by_name(
    odd: subprocess.CompletedProcess[str],
) -> None:
    problems = _failures(odd, "counting_kernel is launched")
    assert set(problems) == {" without enable_fp_fusion"}
    assert _failures(odd, "large_kernel is launched") == []


def test_a_kernel_over_its_instruction_budget_or_without_one_fails_by_name(
    odd: subprocess.CompletedProcess[str],
) -> None:
    new, long = sorted(_failures(odd, "long_kernel"))
    assert new.startswith(" on sm_90 (new) has no budget of ")
    assert long.startswith(" on sm_90 (short) has ") and long.endswith("where 40 were enough")


def test_the_interpreter_is_rejected() -> None:
    command = [sys.executable, "-m", "tools.bench.resources"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 2
    assert "unset TRITON_INTERPRET" in ran.stderr

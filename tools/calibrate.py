"""Fit the constants of the cost model to public kernel benchmarks, and draw the sample for tests.

    pip install pyarrow; pip download aiconfigurator-core==0.12.0 --no-deps
    python -m tools.calibrate aiconfigurator_core-0.12.0-*.whl [--write]

The constants are fitted to tables of SGLang and vLLM, without the rows of the sample. Copy the
printed constants to simulation/cost/kernels.py. --write replaces sample.csv in
simulation/cost/calibration.
"""

import argparse
import csv
import io
import math
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet

from simulation.cost.calibration import HEAD_DIM, SAMPLE, KernelTime
from simulation.cost.kernels import GPUS, Gpu

FRAMEWORKS = {"sglang": "0.5.14", "vllm": "0.24.0"}
ROWS = 60  # rows of the sample, for each GPU and kernel
FIT_ROWS = 2000  # rows of each framework
SEED = 1
Row = Mapping[str, Any]
Shape = tuple[int, ...]


def _product(row: Row) -> Shape | None:
    wanted = row["gemm_dtype"] == "bfloat16" and min(row["n"], row["k"]) >= 1024
    return (row["m"], row["n"], row["k"]) if wanted else None


def _grouped_heads(row: Row) -> bool:
    """Return whether the attention is that of a model in the tables, or of one of its ranks."""
    return (
        row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
        and row["window_size"] == 0
        and row["head_dim"] == HEAD_DIM
        and 1 <= row["num_key_value_heads"] <= 8
        and 1 < row["num_heads"] / row["num_key_value_heads"] <= 16
    )


def _decode(row: Row) -> Shape | None:
    rows, context, heads = row["batch_size"], row["step"] + row["isl"], row["num_key_value_heads"]
    large = context >= 128 and 4 * rows * context * heads * HEAD_DIM > 50e6
    return (rows, context, heads) if large and _grouped_heads(row) else None


def _prefill(row: Row) -> Shape | None:
    rows, tokens, heads = row["batch_size"], row["isl"], row["num_heads"]
    large = 2 * rows * tokens**2 * heads * HEAD_DIM > 0.1e12
    return (rows, tokens, heads) if large and _grouped_heads(row) else None


def _experts(row: Row) -> Shape | None:
    inner = row["inter_size"] // row["moe_tp_size"]
    wanted = row["moe_dtype"] == "bfloat16" and row["distribution"] == "power_law_1.01"
    if not wanted or row["moe_ep_size"] > 1 or inner < 128 or row["num_experts"] > 256:
        return None
    return (row["num_tokens"], row["hidden_size"], inner, row["topk"], row["num_experts"])


TABLES: Mapping[str, tuple[str, Callable[[Row], Shape | None]]] = {
    "product": ("gemm/{}/gemm_perf", _product),
    "decode": ("attention/{}/generation_attention_perf", _decode),
    "prefill": ("attention/{}/context_attention_perf", _prefill),
    "experts": ("moe/{}/moe_perf", _experts),
}


def read(wheel: zipfile.ZipFile, gpu: str, framework: str, kernel: str) -> Iterator[KernelTime]:
    """Yield the rows of one table that the cost model covers."""
    version = FRAMEWORKS[framework]
    path, shape_of = TABLES[kernel]
    name = path.format(f"{framework}/{version}")
    content = wheel.read(f"aiconfigurator_core/systems/data/{gpu}_sxm/{name}.parquet")
    for row in pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist():
        shape = shape_of(row)
        if shape is not None:
            yield KernelTime(gpu, f"{framework} {version}", kernel, shape, 1e3 * row["latency"])


def errors(rows: Sequence[KernelTime], gpu: Gpu) -> tuple[float, float]:
    """Return the mean absolute error and the bias, as shares of the measured times."""
    found = [row.predicted_us(gpu) / row.us - 1 for row in rows]
    return sum(map(abs, found)) / len(found), sum(found) / len(found)


def fit(rows: Sequence[KernelTime], gpu: Gpu, kernel: str) -> Gpu:
    """Return the GPU with constants of `kernel` that minimise the mean absolute logarithm of
    predicted over measured, by a search along one constant after the other."""

    def loss(candidate: Gpu) -> float:
        ratios = (row.predicted_us(candidate) / row.us for row in rows)
        return sum(abs(math.log(ratio)) for ratio in ratios) / len(rows)

    best, least, step = gpu, loss(gpu), 0.2
    while step > 0.005:
        before = least
        for field in msgspec.structs.fields(getattr(best, kernel)):
            for factor in (1 + step, 1 / (1 + step)):
                constants = getattr(best, kernel)
                value = getattr(constants, field.name) * factor
                moved = msgspec.structs.replace(constants, **{field.name: value})
                candidate = msgspec.structs.replace(best, **{kernel: moved})
                if (found := loss(candidate)) < least:
                    best, least = candidate, found
        if least == before:
            step /= 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="of aiconfigurator-core")
    parser.add_argument("--write", action="store_true", help=f"write {SAMPLE.name}")
    options = parser.parse_args()
    drawn: list[KernelTime] = []
    with zipfile.ZipFile(options.wheel) as wheel:
        for name, gpu in GPUS.items():
            for kernel in TABLES:
                rng = random.Random(f"{SEED} {name} {kernel}")
                tables = {each: list(read(wheel, name, each, kernel)) for each in FRAMEWORKS}
                known: list[KernelTime] = []
                for rows in tables.values():
                    rng.shuffle(rows)
                    drawn += rows[: ROWS // len(FRAMEWORKS)]
                    known += rows[ROWS // len(FRAMEWORKS) :][:FIT_ROWS]
                fitted = fit(known, gpu, kernel)
                print(name, getattr(fitted, kernel))
                for framework, rows in tables.items():
                    (mean, bias), (new, new_bias) = errors(rows, gpu), errors(rows, fitted)
                    print(
                        f"  {framework}, {len(rows)} rows: error now {mean:.1%} ({bias:+.1%}), "
                        f"fitted {new:.1%} ({new_bias:+.1%})",
                        flush=True,
                    )
    if options.write:
        with SAMPLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["gpu", "framework", "kernel", "shape", "us"])
            for row in drawn:
                shape = "x".join(map(str, row.shape))
                writer.writerow([row.gpu, row.framework, row.kernel, shape, f"{row.us:.1f}"])


if __name__ == "__main__":
    main()

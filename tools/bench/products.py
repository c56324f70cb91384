"""Compare all forms of a model's matrix products in CPU steps with the memory's read rate.

    python -m tools.bench.products [--threads 2] [--rows 1 8 16 64 256] [--rounds 5]

The weights are 28 random layers of a Qwen3 with 0.44 billion parameters (hidden 1024, intermediate
3072). Forms take turns within every round, and so does a plain read of a GiB. The best round
counts. `of read` is the rate of weight bytes as a share of that read's rate, which is the limit for
few rows. Run it on an idle machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.models.linear import Form, Linear, onednn
from engine.models.linear.dense import DenseForm
from engine.models.linear.int8 import Int8Form
from engine.models.linear.packed import PackedForm
from engine.models.linear.panels import Int8PanelForm, PanelForm
from engine.runner.cpu import use_cpu
from kernels.device import compiled_for
from tools.bench.support.record import emit, say, table

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # qkv, output, gate_up, down
LAYERS = 28
READ_NUMBERS = 1 << 28
COLUMNS = {
    "rows": "{rows}",
    "form": "{form}",
    "ms": "{ms:.1f}",
    "GiB/s": "{gib_per_s:.1f}",
    "of read": "{of_read:.0%}",
    "G operations/s": "{gops:.0f}",
}


def forms() -> dict[str, Form]:
    """Return the forms that this machine supports."""
    cpu, bfloat16 = torch.device("cpu"), torch.bfloat16
    made: dict[str, Form] = {"plain bfloat16": DenseForm(cpu, bfloat16)}
    if onednn.packs_bfloat16():
        made["packed bfloat16"] = PackedForm(bfloat16)
    if onednn.multiplies_int8():
        made["int8"] = Int8Form()
    compiled = compiled_for(cpu)
    if compiled is not None and compiled.multiplies(bfloat16):
        made["bfloat16 in panels"] = PanelForm(bfloat16, compiled)
    if compiled is not None and compiled.multiplies(torch.int8):
        made["int8 in panels"] = Int8PanelForm(compiled)
    return made


def measure(rows: Sequence[int], rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    models: dict[str, list[Linear]] = {
        name: [form.hold(torch.randn(shape), None) for _ in range(LAYERS) for shape in SHAPES]
        for name, form in forms().items()
    }
    numbers = LAYERS * sum(out * columns for out, columns in SHAPES)
    big = torch.ones(READ_NUMBERS)
    read_s = float("inf")
    best = {(count, name): float("inf") for count in rows for name in models}
    for _ in range(rounds):
        read_s = min(read_s, _seconds(big.sum))
        for count in rows:
            inputs = [torch.randn(count, columns, dtype=torch.bfloat16) for _, columns in SHAPES]
            for name, linears in models.items():
                elapsed = _seconds(partial(_step, linears, inputs))
                best[count, name] = min(best[count, name], elapsed)
    read = big.nbytes / read_s
    measured: list[dict[str, object]] = []
    for (count, name), seconds in best.items():
        rate = sum(linear.nbytes for linear in models[name]) / seconds
        measured.append(
            {
                "rows": count,
                "form": name,
                "ms": seconds * 1e3,
                "gib_per_s": rate / 2**30,
                "of_read": rate / read,
                "gops": 2 * numbers * count / seconds / 1e9,
            }
        )
    say(f"plain read: {read / 2**30:.1f} GiB/s")
    return measured


def _step(linears: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> None:
    for place, linear in enumerate(linears):
        linear.apply(inputs[place % len(inputs)])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.products", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    use_cpu(asked.threads, "auto")
    with torch.inference_mode():
        measured = measure(asked.rows, asked.rounds)
    table(measured, COLUMNS)
    emit("products", vars(asked), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())

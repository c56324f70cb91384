"""Compare Baton on a CPU with llama.cpp, transformers, and the limits of the machine.

    python -m tools.bench.cpu --llama-python PYTHON     everything
    python -m tools.bench.cpu --only one first          some parts of it

The model is a Qwen3 of 0.45 billion parameters with random weights. One part uses a model as large
as the demo model. It is served by Baton as `baton up` starts it, by one colocated node, by that
node with int8 weights, by transformers' continuous batching, and by llama.cpp on the same weights.

All systems of a part run at the same time and receive requests in turns. Every round has prompts of
its own, and each ratio is within one round. The floor of a step is its bytes over the read
bandwidth, which is measured between the rounds.
"""

import argparse
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop

from common.config import Quantize
from tests.support.models.checkpoints import VOCABULARY_SIZE
from tools.bench.cpu import floor as cpu_floor
from tools.bench.cpu import in_process
from tools.bench.cpu.figures import (
    Figure,
    Measured,
    agreement,
    best,
    growth,
    ratios,
    spreads,
)
from tools.bench.cpu.floor import Floor
from tools.bench.cpu.systems_in_turns import (
    StreamLoad,
    Systems,
    baton,
    llama,
    measured,
    transformers,
)
from tools.bench.support.models import (
    QWEN3_450M,
    QWEN3_SMALL,
    TINY,
    in_int4,
    kept,
    weight_bytes,
)
from tools.bench.support.record import ROOT, emit, parsed, say, show

THREADS = (1, 2)  # numbers of threads tried for each peer
DEFAULT, COLOCATED, INT8 = "Baton, default flags", "Baton, colocated", "Baton, colocated, int8"
TRANSFORMERS, LLAMA, LLAMA_Q8 = "transformers", "llama.cpp bf16", "llama.cpp Q8_0"
GAP, RATE, FIRST = ("itl_ms", "p50"), ("tokens_per_s",), ("ttft_ms", "p50")
PAGE_TOKENS = 16
Key = TypeVar("Key")
Found = tuple[Measured, list[Figure]]


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """The sizes of the models and loads."""

    name: str  # name of the large model
    model: dict[str, Any]
    prompt: int
    output: int
    first: tuple[int, int]  # prompt lengths of the time-to-first-token part
    tiny_output: int
    long_streams: int
    long_prompt: int
    long_prefixes: int  # enough that the KV of one layer exceeds the CPU caches
    read_bytes: int


FULL = BenchSizes("qwen3-450m", QWEN3_450M, 256, 32, (256, 2048), 64, 64, 2048, 16, 1 << 30)
QUICK = BenchSizes("qwen3-small", QWEN3_SMALL, 32, 8, (32, 64), 8, 4, 64, 2, 1 << 24)


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of all parts."""

    sizes: BenchSizes
    large: Path
    tiny: Path
    llama_python: str  # "": llama.cpp is left out
    rounds: int

    def all_systems(self) -> Systems:
        int8 = ["--engine.quantize=int8"]
        return {
            DEFAULT: partial(baton, "disaggregated", self.large),
            COLOCATED: partial(baton, "colocated", self.large),
            INT8: partial(baton, "colocated", self.large, int8),
            TRANSFORMERS: partial(transformers, self.large, "bfloat16", THREADS),
            LLAMA: partial(llama, self.llama_python, self.large, "bf16", THREADS),
            LLAMA_Q8: partial(llama, self.llama_python, self.large, "q8_0", THREADS),
        }

    def floor(self) -> Floor:
        return cpu_floor.measured(self.sizes.read_bytes, self.sizes.model)

    async def measured(
        self, systems: Systems, *traffics: StreamLoad, vocabulary: int = 0
    ) -> Measured:
        """Measure systems of the large model, or of another vocabulary."""
        return await measured(
            systems,
            traffics,
            vocabulary=vocabulary or self.sizes.model["vocab_size"],
            rounds=self.rounds,
            floor=self.floor,
        )

    def in_process(
        self, one_round: Callable[[], Iterable[tuple[Key, float]]]
    ) -> tuple[Measured, dict[Key, list[float]]]:
        """Measure in this process. Returns the value of each round by key."""
        found, values = Measured(), defaultdict[Key, list[float]](list)
        for number in range(1, self.rounds + 1):
            say(f"  round {number} of {self.rounds}")
            found.floors.append(self.floor())
            for key, value in one_round():
                values[key].append(value)
        return found, values


async def _one(bench: Bench) -> Found:
    load, sizes = "1 stream", bench.sizes
    traffic = StreamLoad(load, 1, 1, sizes.prompt, sizes.output)
    found = await bench.measured(bench.all_systems(), traffic)
    least_ms = 1e3 * found.floor.step_s(weight_bytes(bench.large))

    def in_floors(system: str) -> list[float]:
        return [gap / least_ms for gap in found.table.values(system, load, *GAP)]

    what = f"gap between tokens, {load}, in floors"
    return found, [
        found.figure(f"{what}: default flags", in_floors(DEFAULT), "low", 1.25),
        found.figure(f"{what}: colocated", in_floors(COLOCATED), "low"),
        found.figure(f"{what}: llama.cpp bf16", in_floors(LLAMA), "low", of=[LLAMA]),
        *_rates(found, load, goal=1.1, goal_int8=1.1),
    ]


async def _eight(bench: Bench) -> Found:
    load, sizes = "8 streams", bench.sizes
    traffic = StreamLoad(load, 8, 8, sizes.prompt, sizes.output)
    found = await bench.measured(bench.all_systems(), traffic)
    return found, _rates(found, load, goal=1.8, goal_int8=2.0)


def _rates(found: Measured, load: str, *, goal: float, goal_int8: float) -> list[Figure]:
    return [
        _rate(found, load, COLOCATED, LLAMA, goal),
        _rate(found, load, DEFAULT, LLAMA),
        _rate(found, load, COLOCATED, TRANSFORMERS),
        _rate(found, load, INT8, LLAMA_Q8, goal_int8),
    ]


def _rate(found: Measured, load: str, system: str, peer: str, goal: float | None = None) -> Figure:
    ours, theirs = (found.table.values(name, load, *RATE) for name in (system, peer))
    what = f"tokens/s, {load}: {system} / {peer}"
    return found.figure(what, ratios(ours, theirs), "high", goal, of=[system, peer])


async def _first(bench: Bench) -> Found:
    sizes, systems = bench.sizes, dict(bench.all_systems())
    del systems[INT8], systems[LLAMA_Q8]
    traffics = [StreamLoad(f"prompt of {tokens}", 1, 1, tokens, 1) for tokens in sizes.first]
    found = await bench.measured(systems, *traffics)
    figures = []
    for tokens, traffic in zip(sizes.first, traffics, strict=True):
        times = {name: found.table.values(name, traffic.name, *FIRST) for name in systems}
        peers = best([times[TRANSFORMERS], times[LLAMA]], "low")
        for name, goal in ((COLOCATED, 1.0), (DEFAULT, None)):
            what = f"first token, {traffic.name}: time of the better peer / {name}"
            figures.append(found.figure(what, ratios(peers, times[name]), "high", goal, of=[LLAMA]))
        least_ms = 1e3 * found.floor.product_s(cpu_floor.product_flops(sizes.model, tokens))
        shares = [least_ms / took for took in times[COLOCATED]]
        goal = 0.85 if tokens == sizes.first[0] else None
        what = f"prefill, {traffic.name}, products alone as a share of oneDNN's bf16 rate"
        figures.append(found.figure(what, shares, "high", goal))
    return found, figures


async def _tiny(bench: Bench) -> Found:
    load = "tiny model, 16 streams"
    systems: Systems = {
        DEFAULT: partial(baton, "disaggregated", bench.tiny),
        COLOCATED: partial(baton, "colocated", bench.tiny),
        TRANSFORMERS: partial(transformers, bench.tiny, "float32", THREADS),
    }
    traffic = StreamLoad(load, 16, 48, 128, bench.sizes.tiny_output)
    found = await bench.measured(systems, traffic, vocabulary=VOCABULARY_SIZE)
    for name in (DEFAULT, COLOCATED):
        if agreement(found.table, load, name, TRANSFORMERS) < 1.0:
            raise SystemExit(f"{name} and transformers answer differently: no speed without proof")
    return found, [
        _rate(found, load, DEFAULT, TRANSFORMERS, 3.0),
        _rate(found, load, COLOCATED, TRANSFORMERS),
    ]


async def _context(bench: Bench) -> Found:
    """Measure decoding with long contexts.

    The requests share prefixes, because the KV of separate prompts would fill the memory and take a
    minute to compute. A step reads each prefix only after all others, so it comes from memory and
    not from a CPU cache.
    """
    sizes, own, output = bench.sizes, PAGE_TOKENS, 16
    streams = sizes.long_streams
    short = StreamLoad(f"8 streams x {sizes.prompt}", 8, 8, sizes.prompt, output)
    long = StreamLoad(
        f"{streams} streams x {sizes.long_prompt}",
        *(streams, streams, sizes.long_prompt, output),
        num_prefixes=sizes.long_prefixes,
        own_tokens=own,
    )
    tokens = long.num_prefixes * long.prompt_tokens + streams * 2 * (own + output)
    pages = 64 + (tokens + 2 * 8 * (sizes.prompt + output)) // PAGE_TOKENS
    flags = (f"--engine.cache.num-pages={pages}", "--engine.cache.swap-pages=0")
    systems: Systems = {COLOCATED: partial(baton, "colocated", bench.large, flags)}
    found = await bench.measured(systems, short, long)

    def read_bytes(traffic: StreamLoad) -> int:
        held = traffic.streams * (traffic.prompt_tokens + output // 2)
        each = cpu_floor.kv_bytes_per_token(sizes.model, torch.bfloat16.itemsize)
        return weight_bytes(bench.large) + held * each

    gaps = {one.name: found.table.values(COLOCATED, one.name, *GAP) for one in (short, long)}
    grown = growth(gaps[long.name], gaps[short.name], read_bytes(long), read_bytes(short))
    what = f"a step of {long.name} over {short.name}: growth over that of the bytes read"
    floors = [gap / (1e3 * found.floor.step_s(read_bytes(long))) for gap in gaps[long.name]]
    return found, [
        found.figure(what, grown, "low", 1.3),
        found.figure(f"gap between tokens, {long.name}, in floors", floors, "low"),
    ]


async def _delta(bench: Bench) -> Found:
    found, speedups = bench.in_process(in_process.delta_net_speedups)
    return found, [
        found.figure(f"delta net, {step}: time of torch / compiled", values, "high", 1.0)
        for step, values in speedups.items()
    ]


async def _int4(bench: Bench) -> Found:
    """Measure steps with weights of 16, 8 and 4 bits."""
    forms: dict[str, tuple[Path, Quantize]] = {
        "bfloat16": (bench.large, "none"),
        "int8": (bench.large, "int8"),
        "int4": (in_int4(bench.large), "none"),
    }
    found, took_ms = bench.in_process(in_process.WeightForms(forms).least_ms)
    figures = []
    for (step, form), values in took_ms.items():
        figures.append(found.figure(f"{step}, {form}: CPU time in ms", values, "low"))
        if form != "int4":
            compared = ratios(took_ms[step, "int4"], values)
            figures.append(found.figure(f"{step}: time of int4 / {form}", compared, "low"))
    return found, figures


PARTS: dict[str, Callable[[Bench], Awaitable[Found]]] = {
    "one": _one,
    "eight": _eight,
    "first": _first,
    "tiny": _tiny,
    "context": _context,
    "delta": _delta,
    "int4": _int4,
}


def main() -> None:
    options = parsed(
        "cpu",
        __doc__,
        ("--only", PARTS, "parts to run"),
        ("--rounds", 5, "rounds"),
        ("--quick", False, "one round of a tiny model: its figures say nothing"),
        ("--llama-python", "", "Python with llama-cpp-python and gguf. Without it no llama.cpp"),
        ("--models", ROOT / "var" / "bench-models", "where checkpoints are made and kept"),
    )
    uvloop.run(_run(options))


async def _run(options: argparse.Namespace) -> None:
    sizes = QUICK if options.quick else FULL
    bench = Bench(
        sizes=sizes,
        large=kept(options.models, sizes.name, torch.bfloat16, sizes.model),
        tiny=kept(options.models, "tiny", torch.float32, TINY),
        llama_python=options.llama_python,
        rounds=1 if options.quick else options.rounds,
    )
    figures, floors, rows = list[Figure](), list[Floor](), list[dict[str, Any]]()
    for name in options.only:
        say(f"part {name}")
        found, new_figures = await PARTS[name](bench)
        show(spreads(found.table))
        _show_figures(new_figures)
        figures += new_figures
        floors += found.floors
        rows += [{"part": name, **row} for row in found.table.rows]
    if len(options.only) > 1:
        _show_figures(figures)
    say(_noise(floors))
    for row in rows:
        del row["token_ids"]
    emit(
        "cpu",
        vars(options),
        rows,
        figures=[figure.record() for figure in figures],
        floors=[[floor.read_bytes_per_s, floor.product_flops_per_s] for floor in floors],
    )


def _show_figures(figures: list[Figure]) -> None:
    shown = ("what", "median", "worst", "goal", "reached", "note")
    records = [figure.record() for figure in figures]
    show([{name: record[name] for name in shown} for record in records])


def _noise(floors: list[Floor]) -> str:
    reads = [floor.read_bytes_per_s / 2**30 for floor in floors]
    products = [floor.product_flops_per_s / 1e9 for floor in floors]
    return (
        f"Before the rounds the machine read {min(reads):.1f} to {max(reads):.1f} GiB/s and "
        f"multiplied at {min(products):.0f} to {max(products):.0f} GFLOP/s in bfloat16: where "
        "these differ much, others had their share of it."
    )


if __name__ == "__main__":
    main()

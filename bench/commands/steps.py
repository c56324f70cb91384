"""Time single engine steps on this machine, and write a file for simulated nodes and baton plan."""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.commands.command import EXIT_USAGE, add_model_flag, numbers, output_file
from bench.facts import cpu_name, gpu_names
from bench.session import ProgressView
from cli.client import ranged
from common import settings
from common.config import DecodeConfig, EngineConfig
from common.errors import ConfigError
from common.settings import add_options
from simulation.cost.measured import MeasuredStep, StepTable

if TYPE_CHECKING:
    from bench.steps import StepTimer

PROGRAM = "baton bench steps"
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (64, 512, 2048, 8192)
_PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 8192)
_OUT = "baton-bench-steps.json"
_MAX = 1 << 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    add_options(
        parser,
        ("--rows", numbers(int, _MAX), _ROWS, "N,N,...", "rows of decode steps (1,2,4,...,256)"),
        ("--contexts", numbers(int, _MAX), _CONTEXTS, "N,N,...", "their KV tokens (64,512,...)"),
        ("--prompts", numbers(int, _MAX), _PROMPTS, "N,N,...", "lengths of prompts (16,64,...)"),
        ("--steps", ranged(int, 1), 20, "N", "decode steps of each kind. The median counts (20)"),
        ("--repeats", ranged(int, 1), 3, "N", "repeats of each prompt. The median counts (3)"),
        ("--out", output_file, Path(_OUT), "FILE", f"file of the step times ({_OUT})"),
    )
    parser.epilog = (
        "Other flags are those of a decode node, such as --device cpu or --engine.threads 1. Rows "
        "and lengths for which there is no room are left out. Use the machine for nothing else "
        "meanwhile."
    )


def run(options: argparse.Namespace) -> int:
    """Time the steps and write the file. Returns the exit code."""
    flags = [f"--model={options.model}", *options.node_flags]
    config = settings.read(DecodeConfig, PROGRAM, flags).engine

    from bench.steps import StepTimer  # imported late: torch takes seconds

    with ProgressView() as show:
        try:
            timer = StepTimer(config)
        except ConfigError as error:
            show.say(f"{PROGRAM}: {error}", style="red")
            return EXIT_USAGE
        try:
            steps = (*_decodes(timer, options, show, config), *_prompts(timer, options, show))
            table = _table(timer, config, steps)
        finally:
            timer.close()
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(table)))
        show.say(f"step times: {options.out}")
    print(json.dumps({"bench": "steps", "file": str(options.out), "steps": len(steps)}))
    return 0


def _decodes(
    timer: "StepTimer", options: argparse.Namespace, show: ProgressView, config: EngineConfig
) -> Iterator[MeasuredStep]:
    context_length = timer.engine.core.shape.context_length
    points = [
        (rows, context)
        for rows in options.rows
        for context in options.contexts
        if rows <= config.scheduler.max_running_requests
        and context + 2 * options.steps < context_length
        and rows * (context + 2 * options.steps) < timer.kv_capacity_tokens
    ]
    with show.doing("decode steps", len(points)) as tick:
        timer.decode(1, options.contexts[0], options.steps)  # warm-up
        for rows, context in points:
            yield timer.decode(rows, context, options.steps)
            tick()


def _prompts(
    timer: "StepTimer", options: argparse.Namespace, show: ProgressView
) -> Iterator[MeasuredStep]:
    """Yield the median of the repeats of each kind of step. The first repeat is the warm-up."""
    longest = min(timer.engine.core.shape.context_length, timer.kv_capacity_tokens) - 2
    lengths = [length for length in options.prompts if length <= longest]
    found: dict[tuple[int, int], list[MeasuredStep]] = defaultdict(list)
    with show.doing("prompts", len(lengths) * (options.repeats + 1)) as tick:
        for length in lengths:
            for repeat in range(options.repeats + 1):
                for step in timer.prefill(length):
                    if repeat:
                        found[step.tokens, step.context].append(step)
                tick()
    for alike in found.values():
        seconds = statistics.median(step.seconds for step in alike)
        yield msgspec.structs.replace(alike[0], seconds=seconds)


def _table(timer: "StepTimer", config: EngineConfig, steps: Sequence[MeasuredStep]) -> StepTable:
    engine = timer.engine
    loaded, shape = engine.loaded, engine.shape
    spec = engine.model.spec
    weights = loaded.loadable.weight_bytes(engine.model.target)
    return StepTable(
        model=Path(config.model).name,
        machine=next(iter(gpu_names()), cpu_name()) if shape.device.type == "cuda" else cpu_name(),
        weight_bytes=weights,
        kv_bytes_per_token=shape.layout.token_bytes,
        kv_capacity_tokens=timer.kv_capacity_tokens,
        vocabulary=spec.vocabulary_size,
        context_length=shape.context_length,
        steps=tuple(steps),
    )

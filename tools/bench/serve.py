"""Measure TTFT, ITL and throughput of whole systems beside transformers' continuous batching.

    python -m tools.bench.serve                     both systems and the peer, about two minutes
    python -m tools.bench.serve --target HOST:PORT  a router that runs already, and no peer
    python -m tools.bench.serve --images            text streams while images arrive

One run measures, one after the other, a disaggregated system (router, prefill node, decode node), a
colocated one (router, decode node), and transformers' continuous batching. All have the same random
weights and the same prompts. Speed is reported only if the greedy responses are the same
everywhere. Goal: at 16 streams on a CPU at least 5 x the tokens/s of transformers, which has no RPC
overhead.

With --images, text streams are measured without images, while the prefill node encodes images on
its thread, and while an encode node does. All processes share the cores of this machine.
"""

import argparse
import asyncio
import dataclasses
import io
import itertools
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image as Picture

from bench.traffic.workload import WorkloadRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.vision import SIDE, make_vision_checkpoint
from tools.bench.support.load import Answer, Client, cpu_row, make_jobs, summary
from tools.bench.support.models import TINY
from tools.bench.support.peer import transformers_peer
from tools.bench.support.record import emit, say, table
from tools.bench.support.systems import Mode, System, as_up, serving

GOAL_STREAMS = 16
GOAL_RATIO = 5.0
PEER_S = 300.0
WARM_UP_TOKENS = 8
IMAGE_SIDE = 30  # tokens

COLUMNS = {
    "system": "{system}",
    "load": "{load}",
    "req": "{requests}",
    "failed": "{failed}",
    "tok/s": "{tokens_per_s:.0f}",
    "TTFT ms p50": "{ttft_ms[p50]:.1f}",
    "p90": "{ttft_ms[p90]:.1f}",
    "p99": "{ttft_ms[p99]:.1f}",
    "ITL ms p50": "{itl_ms[p50]:.1f}",
    "p90 ": "{itl_ms[p90]:.1f}",
    "p99 ": "{itl_ms[p99]:.1f}",
    "tok/msg": "{tokens_per_message:.2f}",
    "server CPU us/tok": "{server_cpu_us_per_token:.0f}",
    "client CPU": "{client_cpu:.0%}",
}

Tokens = list[list[int]]


def main() -> None:
    options = _options()
    if options.images:
        uvloop.run(_beside_images(options))
    else:
        uvloop.run(_given(options) if options.target else _compared(options))


async def _given(options: argparse.Namespace) -> None:
    rows, _ = await _measure(System("given", options.target, None), options)
    table(rows, COLUMNS)
    emit("serve", vars(options), rows)


async def _compared(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    outputs: dict[str, Tokens] = {}
    modes: tuple[Mode, ...] = ("disaggregated", "colocated")
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as made:
        model = Path(options.model or made)
        if not options.model:
            make_checkpoint(model, **TINY)
        for mode in modes:
            say(f"{mode} ...")
            flags = [f"--device={options.device}", "--dtype=float32"]
            async with serving(mode, model, flags) as system:
                measured, outputs[mode] = await _measure(system, options)
            rows += measured
        say("transformers continuous batching ...")
        peer_rows, outputs["transformers"] = _peer(model, options)
    table([*rows, *peer_rows], COLUMNS)
    equal = _equal_answers(outputs)
    goal = _goal(rows, peer_rows)
    say(f"answers equal to transformers': {equal}")
    say(f"tokens/s against transformers at {GOAL_STREAMS} streams (goal {GOAL_RATIO:g}): {goal}")
    if any(share < 1.0 for share in equal.values()):
        raise SystemExit("the answers differ: no speed without proof")
    emit("serve", vars(options), [*rows, *peer_rows], equal_answers=equal, goal=goal)


async def _beside_images(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    seen: list[Tokens] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as made:
        model = make_vision_checkpoint(Path(made), max_position_embeddings=4096)
        file = model / "preprocessor_config.json"
        processor = json.loads(file.read_text()) | {"max_pixels": (IMAGE_SIDE * SIDE) ** 2}
        file.write_text(json.dumps(processor))
        for name, rate, num_encode in (
            ("no images", 0.0, 0),
            ("encoder thread", options.image_rate, 0),
            ("encode node", options.image_rate, 1),
        ):
            say(f"{name} ...")
            flags = ["--dtype=float32"]
            async with as_up("disaggregated", model, flags, num_encode=num_encode) as system:
                row, tokens = await _with_images(system, options, rate)
            rows.append({"system": name, "load": f"{rate:g} images/s", **row})
            seen += [tokens] if rate else []
    table(rows, COLUMNS)
    num_same = min(map(len, seen))
    if seen[0][:num_same] != seen[1][:num_same]:
        raise SystemExit("the answers differ: no speed without proof")
    emit("serve images", vars(options), rows, compared_images=num_same)


async def _with_images(
    system: System, options: argparse.Namespace, rate: float
) -> tuple[dict[str, Any], Tokens]:
    """Run the most text streams while images arrive. Return the row of the texts, and the tokens of
    the images."""
    vocabulary, streams = await system.vocabulary(), max(options.streams)
    images: list[asyncio.Task[list[int]]] = []

    async def arrive(client: Client) -> None:
        for number in itertools.count():
            images.append(asyncio.create_task(client.look(_picture(number), WARM_UP_TOKENS)))
            await asyncio.sleep(1 / rate)

    async with Client(system.target) as client:
        await client.closed_loop(_warm_up(vocabulary, options), streams)
        await client.look(_picture(-1), WARM_UP_TOKENS)
        arriving = asyncio.create_task(arrive(client)) if rate else None
        jobs = _jobs(options.image_requests, vocabulary, options, series=streams)
        load = client.closed_loop(jobs, streams)
        row, _ = await _timed(system, load)
        if arriving is not None:
            arriving.cancel()
        return row, await asyncio.gather(*images)


def _picture(number: int) -> bytes:
    side, file = IMAGE_SIDE * SIDE, io.BytesIO()
    noise = np.random.default_rng(number + 1).integers(0, 256, (side, side, 3), np.uint8)
    Picture.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.serve", description=__doc__.partition("\n")[0]
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--target", help="a router that runs already")
    which.add_argument("--model", help="checkpoint directory; default: a tiny one made on the spot")
    which.add_argument("--images", action="store_true", help="text streams while images arrive")
    parser.add_argument("--image-rate", type=float, default=2.0, help="images/s")
    parser.add_argument("--image-requests", type=int, default=400, help="texts while images arrive")
    parser.add_argument("--device", default="cpu", help="cpu | cuda:N, for all systems")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, GOAL_STREAMS])
    parser.add_argument("--requests-per-stream", type=int, default=6)
    parser.add_argument("--rates", type=float, nargs="*", default=[8.0, 32.0], help="requests/s")
    parser.add_argument("--open-seconds", type=float, default=6.0, help="of each open loop")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _jobs(
    count: int, vocabulary: int, options: argparse.Namespace, series: int
) -> list[WorkloadRequest]:
    """Return the jobs, the same for every system. Two series share no prompt, so prefix caches have
    no effect."""
    return make_jobs(
        count,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        vocabulary=vocabulary,
        seed=1000 * options.seed + series,
    )


def _closed_jobs(
    streams: int, vocabulary: int, options: argparse.Namespace
) -> list[WorkloadRequest]:
    return _jobs(streams * options.requests_per_stream, vocabulary, options, series=streams)


def _warm_up(vocabulary: int, options: argparse.Namespace) -> list[WorkloadRequest]:
    jobs = _jobs(max(options.streams), vocabulary, options, series=0)
    return [dataclasses.replace(job, max_tokens=WARM_UP_TOKENS) for job in jobs]


async def _measure(
    system: System, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], Tokens]:
    """Return the rows of all loads, and the tokens of the closed loop with most streams."""
    vocabulary = await system.vocabulary()
    rows: list[dict[str, Any]] = []
    tokens: Tokens = []
    async with Client(system.target) as client:
        await client.closed_loop(_warm_up(vocabulary, options), max(options.streams))
        for streams in options.streams:
            jobs = _closed_jobs(streams, vocabulary, options)
            row, answers = await _timed(system, client.closed_loop(jobs, streams))
            rows.append({"system": system.name, "load": f"{streams} streams", **row})
            tokens = max(tokens, [answer.token_ids for answer in answers], key=len)
        for number, rate in enumerate(options.rates):
            count = max(1, round(rate * options.open_seconds))
            jobs = _jobs(count, vocabulary, options, series=500 + number)
            row, _ = await _timed(system, client.open_loop(jobs, rate, options.seed))
            rows.append({"system": system.name, "load": f"{rate:g} req/s", **row})
    return rows, tokens


async def _timed(
    system: System, load: Awaitable[list[Answer]]
) -> tuple[dict[str, Any], list[Answer]]:
    """Run one load. Returns its summary with the CPU of each process, in shares of a core."""
    before = await system.cpu_seconds()
    started, cpu = time.perf_counter(), time.process_time()
    answers = await load
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    after = await system.cpu_seconds()
    spent = {name: after[name] - before[name] for name in before}
    for answer in answers:
        if answer.error:
            say(f"{system.name}: {answer.error}: {answer.detail}")
    row = {**summary(answers), **cpu_row(spent, answers), "client_cpu": round(cpu_s / wall_s, 2)}
    return row, answers


def _peer(model: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], Tokens]:
    """Run transformers on the closed loops' prompts.

    Returns one row for each number of streams, with the fastest number of threads.
    """
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    spec = {
        "model": str(model),
        "device": options.device,
        "dtype": "float32",
        "threads": sorted({1, len(os.sched_getaffinity(0))}),
        "warm_up": [dataclasses.astuple(job) for job in _warm_up(vocabulary, options)],
        "loads": [
            (streams, [dataclasses.astuple(job) for job in jobs])
            for streams in options.streams
            for jobs in [_closed_jobs(streams, vocabulary, options)]
        ],
    }
    try:
        reply = transformers_peer(spec, PEER_S)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    best: dict[str, dict[str, Any]] = {}
    for row in reply["rows"]:
        fastest = best.setdefault(row["load"], row)
        if row["tokens_per_s"] > fastest["tokens_per_s"]:
            best[row["load"]] = row
    return list(best.values()), reply["tokens"]


def _equal_answers(outputs: dict[str, Tokens]) -> dict[str, float]:
    """Return the share of responses that equal those of transformers, token for token."""
    expected = outputs.pop("transformers")
    return {
        name: sum(mine == theirs for mine, theirs in zip(tokens, expected, strict=True))
        / len(expected)
        for name, tokens in outputs.items()
    }


def _goal(rows: Sequence[dict[str, Any]], peer_rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    load = f"{GOAL_STREAMS} streams"
    peers = [row["tokens_per_s"] for row in peer_rows if row["load"] == load]
    return {
        row["system"]: round(row["tokens_per_s"] / peer, 2)
        for row in rows
        for peer in peers
        if row["load"] == load
    }


if __name__ == "__main__":
    main()

"""Measure text streams beside images: TTFT, ITL and tokens/s, with and without an encode node.

    python -m tools.bench.images [--rate 2] [--streams 4]

Text streams are measured without images, while the prefill node encodes images on its thread, and
while an encode node does. All processes share the cores of this machine. Speed is reported only if
the greedy responses about the images are the same in both systems.
"""

import argparse
import asyncio
import dataclasses
import io
import itertools
import json
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image as Picture

from tests.support.vision import SIDE, make_vision_checkpoint
from tools.bench.support.load import Answer, Client, cpu_row, make_jobs, summary
from tools.bench.support.record import emit, say, table
from tools.bench.support.systems import System, as_up

WARM_UP_TOKENS = 8
IMAGE_SIDE = 30  # in tokens

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


async def measure(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    seen: list[Tokens] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as made:
        model = make_vision_checkpoint(Path(made), max_position_embeddings=4096)
        file = model / "preprocessor_config.json"
        processor = json.loads(file.read_text()) | {"max_pixels": (IMAGE_SIDE * SIDE) ** 2}
        file.write_text(json.dumps(processor))
        for name, rate, num_encode in (
            ("no images", 0.0, 0),
            ("encoder thread", options.rate, 0),
            ("encode node", options.rate, 1),
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
    emit("images", vars(options), rows, compared_images=num_same)


async def _with_images(
    system: System, options: argparse.Namespace, rate: float
) -> tuple[dict[str, Any], Tokens]:
    """Run the most text streams while images arrive.

    Return the row of the texts, and the tokens of the images.
    """
    streams = options.streams
    jobs = make_jobs(
        options.requests + streams,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        vocabulary=await system.vocabulary(),
        seed=options.seed,
    )
    warm_up = [dataclasses.replace(job, max_tokens=WARM_UP_TOKENS) for job in jobs[-streams:]]
    images: list[asyncio.Task[list[int]]] = []

    async def arrive(client: Client) -> None:
        for number in itertools.count():
            images.append(asyncio.create_task(client.look(_picture(number), WARM_UP_TOKENS)))
            await asyncio.sleep(1 / rate)

    async with Client(system.target) as client:
        await client.closed_loop(warm_up, streams)
        await client.look(_picture(-1), WARM_UP_TOKENS)
        arriving = asyncio.create_task(arrive(client)) if rate else None
        row = await _timed(system, client.closed_loop(jobs[:-streams], streams))
        if arriving is not None:
            arriving.cancel()
        return row, await asyncio.gather(*images)


def _picture(number: int) -> bytes:
    side, file = IMAGE_SIDE * SIDE, io.BytesIO()
    noise = np.random.default_rng(number + 1).integers(0, 256, (side, side, 3), np.uint8)
    Picture.fromarray(noise).save(file, "PNG")
    return file.getvalue()


async def _timed(system: System, load: Awaitable[list[Answer]]) -> dict[str, Any]:
    """Run one load. Returns its summary, with the CPU of each process as shares of a core."""
    before = await system.cpu_seconds()
    started, cpu = time.perf_counter(), time.process_time()
    answers = await load
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    after = await system.cpu_seconds()
    spent = {name: after[name] - before[name] for name in before}
    for answer in answers:
        if answer.error:
            say(f"{system.name}: {answer.error}: {answer.detail}")
    return {**summary(answers), **cpu_row(spent, answers), "client_cpu": round(cpu_s / wall_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.images", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rate", type=float, default=2.0, help="images/s")
    parser.add_argument("--requests", type=int, default=400, help="texts while images arrive")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

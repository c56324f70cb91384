"""Measure text streams beside images: TTFT, ITL and tokens/s, with and without an encode node.

    python -m tools.bench.images [--rate 2] [--streams 4]

Text streams are measured without images, while the prefill node encodes images on its thread, and
while an encode node does. All processes share the cores of this machine. Speed is reported only if
the greedy responses about the images are the same in both systems.
"""

import argparse
import asyncio
import io
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image as Picture

from tests.support.models.vision import SIDE, make_vision_checkpoint
from tools.bench.support.load import Client, cpu_row, make_jobs, summary
from tools.bench.support.peer import shortened
from tools.bench.support.record import emit, parsed, say, show
from tools.bench.support.systems import System, as_up

PROMPT_TOKENS, OUTPUT_TOKENS, WARM_UP_TOKENS = 128, 64, 8
IMAGE_SIDE = 30  # in tokens


async def measure(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    answers: list[list[list[int]]] = []  # tokens about each image, by system
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as made:
        model = _model(Path(made))
        for name, rate, num_encode in (
            ("no images", 0.0, 0),
            ("encoder thread", options.rate, 0),
            ("encode node", options.rate, 1),
        ):
            say(f"{name} ...")
            flags = ["--dtype=float32"]
            async with as_up("disaggregated", model, flags, num_encode=num_encode) as system:
                row, tokens = await _beside_images(system, options, rate)
            rows.append({"system": name, "load": f"{rate:g} images/s", **row})
            answers += [tokens] if rate else []
    show(rows)
    compared = list(zip(*answers, strict=False))
    if any(by_thread != by_node for by_thread, by_node in compared):
        raise SystemExit("the answers differ: no speed without proof")
    emit("images", vars(options), rows, compared_images=len(compared))


def _model(directory: Path) -> Path:
    model = make_vision_checkpoint(directory, max_position_embeddings=4096)
    file = model / "preprocessor_config.json"
    processor = json.loads(file.read_text()) | {"max_pixels": (IMAGE_SIDE * SIDE) ** 2}
    file.write_text(json.dumps(processor))
    return model


async def _beside_images(
    system: System, options: argparse.Namespace, rate: float
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run the text streams while images arrive.

    Return the row of the texts, with the CPU of each process, and the tokens of the images.
    """
    streams = options.streams
    jobs = make_jobs(
        options.requests + streams,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        vocabulary=await system.vocabulary(),
        seed=1,
    )
    images: list[asyncio.Task[list[int]]] = []

    async def arrive(client: Client) -> None:
        for number in itertools.count():
            images.append(asyncio.create_task(client.look(_picture(number), WARM_UP_TOKENS)))
            await asyncio.sleep(1 / rate)

    async with Client(system.target) as client:
        await client.closed_loop(shortened(jobs[-streams:], WARM_UP_TOKENS), streams)
        await client.look(_picture(-1), WARM_UP_TOKENS)
        arriving = asyncio.create_task(arrive(client)) if rate else None
        before = await system.cpu_seconds()
        started, cpu = time.perf_counter(), time.process_time()
        texts = await client.closed_loop(jobs[:-streams], streams)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        spent = {name: s - before[name] for name, s in (await system.cpu_seconds()).items()}
        if arriving is not None:
            arriving.cancel()
        tokens = await asyncio.gather(*images)
    for text in texts:
        if text.error:
            say(f"{system.name}: {text.error}: {text.detail}")
    cpus = cpu_row(spent, texts) | {"client_cpu": round(cpu_s / wall_s, 2)}
    return summary(texts) | cpus, tokens


def _picture(number: int) -> bytes:
    side, file = IMAGE_SIDE * SIDE, io.BytesIO()
    noise = np.random.default_rng(number + 1).integers(0, 256, (side, side, 3), np.uint8)
    Picture.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    options = parsed(
        "images",
        __doc__,
        ("--rate", 2.0, "images per second"),
        ("--requests", 400, "texts while images arrive"),
        ("--streams", 16, "text streams"),
    )
    uvloop.run(measure(options))


if __name__ == "__main__":
    main()

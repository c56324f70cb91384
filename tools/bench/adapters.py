"""Measure the cost of LoRA adapters per decode step, compared with the same step without adapters.

    python -m tools.bench.adapters [--batches 1,16] [--ranks 8,32] [--tokens 32] [--rounds 3]

One engine runs in this process on a CPU. It has a dense model with random weights, and adapters of
all matrices of its layers. The same requests run without an adapter, with one shared adapter, with
four adapters in turn, and with an adapter for one request in four. The ways take turns, and the
round with the fastest steps counts. Time is the CPU time of this process, whose engine has one
thread, so that other processes on the machine hardly count.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from common.request import RequestSpec
from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.sampling import SamplingParams
from engine.batch.request import Request
from engine.build import Engine, build
from tests.support.adapters import make_adapter
from tests.support.checkpoints import reference_model
from tools.bench.support.in_process import decode
from tools.bench.support.models import QWEN3_105M, kept
from tools.bench.support.record import emit, table

PROMPT = 64
NUM_ADAPTERS = 4
WAYS = ("none", "one", "four", "one row in four")


def _adapters(directory: Path, model: Path, rank: int) -> Path:
    """Make the adapters below `directory` unless an earlier run has."""
    shelf = directory / f"adapters-{rank}"
    if not shelf.exists():
        reference = reference_model(model)
        for number in range(NUM_ADAPTERS):
            make_adapter(shelf / str(number), reference, seed=number, rank=rank)
    return shelf


def _engine(directory: Path, rank: int) -> tuple[Engine, EngineConfig]:
    model = kept(directory, "qwen3-105m", torch.bfloat16, QWEN3_105M)
    config = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        cache=CacheConfig(num_pages=1024, host_pages=0, prefix_cache=False),
        scheduler=SchedulerConfig(max_running=128),
        lora=LoraConfig(
            directory=_adapters(directory, model, rank),
            adapters=tuple(map(str, range(NUM_ADAPTERS))),
            slots=NUM_ADAPTERS,
            max_rank=rank,
        ),
    )
    return build(config), config


def _of_row(way: str, row: int, ids: list[AdapterId]) -> AdapterId:
    match way:
        case "one":
            return ids[0]
        case "four":
            return ids[row % len(ids)]
        case "one row in four":
            return NO_ADAPTER if row % 4 else ids[0]
        case _:
            return NO_ADAPTER


def _requests(engine: Engine, way: str, batch: int, tokens: int) -> Iterator[Request]:
    """Yield requests whose adapters are in slots."""
    rng = np.random.default_rng(0)
    ids = [adapter for _, adapter in sorted(engine.loader.names().items())]
    for row in range(batch):
        request = Request.of(
            RequestSpec(
                token_ids=rng.integers(QWEN3_105M["vocab_size"], size=PROMPT)
                .astype(np.int32)
                .tobytes(),
                sampling=SamplingParams(
                    max_tokens=tokens, seed=row, temperature=0, ignore_eos=True
                ),
                adapter=_of_row(way, row, ids),
            ),
            key=row,
            deadline=time.monotonic() + 3600,
            arrived=time.monotonic(),
            origin=(1, row),
        )
        engine.adapters.hold(request)
        assert engine.adapters.take_slot(request)
        yield request


def _step_s(engine: Engine, config: EngineConfig, way: str, batch: int, tokens: int) -> float:
    requests = list(_requests(engine, way, batch, tokens))
    scheduler = engine.scheduler(config, lambda *_: None)
    decoded = decode(engine.runner, scheduler, requests)
    for request in requests:
        engine.adapters.release(request.key)
    return decoded.seconds / decoded.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--ranks", default="8,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--models", type=Path, default=Path("var/bench"), help="where they are kept"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    batches, ranks = (
        [int(each) for each in told.split(",")] for told in (arguments.batches, arguments.ranks)
    )
    for rank in ranks:
        engine, config = _engine(arguments.models, rank)
        for batch in batches:
            least = dict.fromkeys(WAYS, float("inf"))
            for _, way in itertools.product(range(arguments.rounds), WAYS):
                took = _step_s(engine, config, way, batch, arguments.tokens)
                least[way] = min(least[way], took)
            row: dict[str, Any] = {"rank": rank, "batch": batch}
            row["none_ms"] = round(least["none"] * 1e3, 2)
            row |= {way: round(least[way] / least["none"], 2) for way in WAYS[1:]}
            rows.append(row)
    columns = {
        "rank": "{rank}",
        "batch": "{batch}",
        "without, ms": "{none_ms}",
        **{f"{way}, times": f"{{{way}}}" for way in WAYS[1:]},
    }
    table(rows, columns)
    emit("adapters", vars(arguments) | {"models": str(arguments.models)}, rows)


if __name__ == "__main__":
    main()

"""Measure the pause of a node for a weight update: from a directory, and from another node.

    python -m tools.bench.weights [--rounds 3] [--model 450m | tiny] [--path auto] [--pages 512]

A prefill and a decode node, with random weights of Qwen3's shape in bfloat16, receive two
checkpoints in turn. One node reads each from the disk (from the page cache), as with `baton weights
PATH`: it checks them while it serves, then loads them. The other reads them from that node, as with
`baton weights --from`, and is paused for the whole transfer. The rate of the link is compared with
its proved rate and with a copy of memory.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from node.control.engine_control import REPORT_INTERVAL_S
from protos.node_pb2 import PrepareWeightsRequest, PutWeightsRequest, TakeWeightsRequest
from protos.router_pb2 import ContinueRequest, PauseRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, Node, free_ports
from tests.support.scrapes import scraped, total
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M, QWEN3_SMALL

MODELS = {"450m": QWEN3_450M, "tiny": QWEN3_SMALL}
LONGEST_S = 300.0
_SECONDS, _BYTES = "baton_weight_read_seconds_total", "baton_weight_bytes_total"


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="baton-weights-") as directory:
        root = Path(directory)
        names = ("first", "second")
        for seed, name in enumerate(names):
            make_checkpoint(root / name, seed=seed, dtype=torch.bfloat16, **MODELS[options.model])
        port = next(free_ports(1))
        cluster = Cluster(
            root / names[0],
            root / "logs",
            path=options.path,
            node_flags=(
                f"--engine.weights-directory={root}",
                f"--engine.cache.num-pages={options.pages}",
                "--dtype=bfloat16",
                "--engine.threads=1",
            ),
            decode_flags=(f"--metrics-port={port}",),
        )
        async with cluster:
            (lender,), (taker,) = cluster.prefill, cluster.decode
            (link,) = (await taker.describe()).links
            for number in range(options.rounds):
                name = names[(number + 1) % 2]
                rows.append(await _round(lender, taker, name, port))
                record.say(f"round {number + 1}: {rows[-1]}")
        rows[-1]["link_gib_s"] = round(link.gib_per_s, 2)
        rows[-1]["path"] = link.path
    return rows


async def _round(lender: Node, taker: Node, name: str, port: int) -> dict[str, Any]:
    """Return the seconds of each phase."""
    began = time.perf_counter()
    request = PrepareWeightsRequest(path=name)
    weights = (await lender.stub.PrepareWeights(request, timeout=LONGEST_S)).id
    looked = time.perf_counter()
    await _paused(lender)
    await lender.stub.PutWeights(PutWeightsRequest(id=weights), timeout=LONGEST_S)
    put = time.perf_counter()
    await lender.stub.Continue(ContinueRequest(), timeout=LONGEST_S)
    before = await _counted(port)
    await _paused(taker)
    asked = time.perf_counter()
    await taker.stub.TakeWeights(
        TakeWeightsRequest(id=weights, address=lender.address), timeout=LONGEST_S
    )
    took = time.perf_counter()
    await taker.stub.Continue(ContinueRequest(), timeout=LONGEST_S)
    after = await _counted(port)
    num_bytes = after[_BYTES] - before[_BYTES]
    read_s = after[_SECONDS] - before[_SECONDS]
    return {
        "gib": round(num_bytes / 2**30, 3),
        "disk_look_through_s": round(looked - began, 3),
        "disk_put_s": round(put - looked, 3),
        "peer_s": round(took - asked, 3),
        "peer_read_s": round(read_s, 3),
        "peer_put_s": round(took - asked - read_s, 3),
        "read_gib_s": round(num_bytes / 2**30 / read_s, 2),
    }


async def _paused(node: Node) -> None:
    await node.stub.Pause(PauseRequest(mode="retract"), timeout=LONGEST_S)


async def _counted(port: int) -> dict[str, float]:
    await asyncio.sleep(2 * REPORT_INTERVAL_S)
    scrape = scraped(port)
    return {_SECONDS: total(scrape, _SECONDS), _BYTES: total(scrape, _BYTES, copy="read")}


def _copy_gib_s() -> float:
    """Return the rate of a memory copy by one thread."""
    torch.set_num_threads(1)
    source, target = (torch.ones(256 << 20, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 1.0 / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="450m")
    parser.add_argument("--path", default="auto", help="of the KV: auto | nixl | tcp")
    parser.add_argument("--pages", type=int, default=512, help="of the KV pool, 16 tokens each")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    numbers = [key for key in rows[0] if key not in ("link_gib_s", "path")]
    middle = {key: statistics.median(row[key] for row in rows) for key in numbers}
    record.table([middle], {key: f"{{{key}}}" for key in numbers})
    record.emit("weights", vars(options), rows, median=middle, copy_gib_s=round(_copy_gib_s(), 2))


if __name__ == "__main__":
    main()

"""Part serving: a colocated and a disaggregated system on the device, compared with transformers.

All use one model, one machine, and the same prompts. With two devices, both are used. With one
device, the two nodes of the disaggregated system share it by the driver's time slices, so their ITL
shows the cost of sharing a device, not the gain of disaggregation.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import uvloop

from tools.bench.gpu.frame import Row, Tables, guarded
from tools.bench.gpu.model.models import CONFIGS, SERVED, write_checkpoint
from tools.bench.gpu.setting import Setting
from tools.bench.gpu.systems import exposure
from tools.bench.gpu.systems.loads import Loads, Sizes, equal_share, ttft_ms
from tools.bench.support import peer
from tools.bench.support.load import Client
from tools.bench.support.systems import Mode, serving

TABLES: Tables = {
    "time to first token": {
        "system": "{system}",
        "devices": "{devices}",
        "prompt": "{prompt}",
        "TTFT ms p50": "{ttft_ms[p50]:.1f}",
        "p90": "{ttft_ms[p90]:.1f}",
    },
    "hand-off": exposure.COLUMNS,
    "decode under prefill": {
        "system": "{system}",
        "devices": "{devices}",
        "streams": "{streams}",
        "ITL ms p50": "{quiet_ms[p50]:.1f}",
        "p99": "{quiet_ms[p99]:.1f}",
        "under prefills p50": "{disturbed_ms[p50]:.1f}",
        "p99 ": "{disturbed_ms[p99]:.1f}",
        "max": "{disturbed_ms[max]:.1f}",
        "a long prompt alone, ms": "{long_prompt_ms:.0f}",
    },
    "full streams": {
        "system": "{system}",
        "devices": "{devices}",
        "streams": "{streams}",
        "tokens/s": "{tokens_per_s:.0f}",
        "TTFT ms p50": "{ttft_ms[p50]:.1f}",
        "ITL ms p50": "{itl_ms[p50]:.1f}",
        "p99": "{itl_ms[p99]:.1f}",
    },
    "compared": {"what": "{what}", "": "{text}"},
}

SIZES = Sizes(
    vocabulary=CONFIGS[SERVED]["vocab_size"],
    prompt=2048,
    prompts=8,
    long_prompt=8192,
    streams=16,
    stream_prompt=256,
    stream_output=64,
    rounds=2,
)
DRY_SIZES = Sizes(
    vocabulary=CONFIGS["tiny"]["vocab_size"],
    prompt=48,
    prompts=2,
    long_prompt=192,
    streams=2,
    stream_prompt=20,
    stream_output=4,
    rounds=1,
)
MODES: tuple[Mode, ...] = ("colocated", "disaggregated")
CHUNK, DRY_CHUNK = 2048, 64
PAGES, DRY_PAGES = 6144, 256  # pages of each node: two nodes and a reader share a device
PEER_S = 150.0
WARM_UP_TOKENS = 8  # of transformers
MEMORY = Path("/dev/shm")  # the checkpoint is written, read once or twice, and deleted


def measure(setting: Setting) -> Iterator[Row]:
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-gpu-", dir=where) as directory:
        name = setting.sized(SERVED, "tiny")
        bench = _Bench(setting, write_checkpoint(Path(directory), name, setting.device))
        if not setting.dry:
            torch.cuda.empty_cache()
        for mode in MODES:
            yield from guarded(f"{mode} system", _one_by_one(bench.system(mode)))
        yield from guarded("transformers", _one_by_one(bench.transformers()))
        yield from bench.compared()


@dataclass(slots=True, eq=False)
class _Bench:
    """Measures one system after the other, and keeps the data to compare them."""

    setting: Setting
    model: Path
    sizes: Sizes = field(init=False)
    singles: dict[str, list[list[int]]] = field(default_factory=dict)  # tokens
    fulls: dict[str, list[list[int]]] = field(default_factory=dict)
    ttft_ms: dict[str, float] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = self.setting.sized(SIZES, DRY_SIZES)

    async def system(self, mode: Mode) -> AsyncIterator[Row]:
        """Yield all measurements of one system while it runs."""
        setting, sizes = self.setting, self.sizes
        two = not setting.dry and torch.cuda.device_count() > 1
        alone = mode == "colocated"
        names = {"system": mode, "devices": 1 if alone else 2 if two else "1, in turns"}
        prefill_flags = ["--device=cuda:1"] if two else []
        async with contextlib.AsyncExitStack() as stack:
            system = await stack.enter_async_context(
                serving(mode, self.model, self._flags(), prefill_flags=prefill_flags)
            )
            client = await stack.enter_async_context(Client(system.target))
            loads = Loads(client, sizes)
            await loads.warm_up()
            answers = await loads.single()
            self.singles[mode] = [answer.token_ids for answer in answers]
            self._prove(mode)
            times = ttft_ms(answers)
            self.ttft_ms[mode] = times["p50"]
            table = "time to first token"
            yield {"table": table, **names, "prompt": sizes.prompt, "ttft_ms": times}
            quiet = await loads.decoding()
            disturbed, long_prompt_s = await loads.disturbed()
            yield {
                "table": "decode under prefill",
                **names,
                "streams": sizes.streams,
                "quiet_ms": quiet,
                "disturbed_ms": disturbed,
                "long_prompt_ms": long_prompt_s * 1e3,
            }
            answers, row = await loads.full()
            self.fulls[mode] = [answer.token_ids for answer in answers]
            self.tokens_per_s[mode] = row["tokens_per_s"]
            yield {"table": "full streams", **names, "streams": sizes.streams, **row}
            for node in await system.nodes():
                if node.role == "prefill":
                    cuts = exposure.Cuts(setting.sized(CHUNK, DRY_CHUNK), sizes.long_prompt)
                    async for row in exposure.measure(
                        setting, self.model, node.address, sizes.vocabulary, cuts
                    ):
                        yield row

    async def transformers(self) -> AsyncIterator[Row]:
        jobs, streams = Loads.full_jobs(self.sizes), self.sizes.streams
        device, dtype = str(self.setting.device), str(self.setting.dtype).removeprefix("torch.")
        async with peer.transformers(self.model, device, dtype, PEER_S) as ask:
            row = await ask(jobs, peer.shortened(jobs[:streams], WARM_UP_TOKENS), streams, 1)
        self.fulls["transformers"] = row.pop("token_ids")
        self.tokens_per_s["transformers"] = row["tokens_per_s"]
        names = {"system": "transformers", "devices": 1, "streams": streams}
        yield {"table": "full streams", **row, **names}

    def compared(self) -> Iterator[Row]:
        """Compare all pairs of systems measured so far.

        In bfloat16, systems that batch differently may give different responses. Single prompts are
        batched alike.
        """
        first, second = "colocated", "disaggregated"
        if {first, second} <= self.singles.keys():
            equal = equal_share(self.singles[second], self.singles[first])
            yield _compared(f"single answers, {second} equal to {first}", equal, f"{equal:.0%}")
            added = self.ttft_ms[second] - self.ttft_ms[first]
            yield _compared("TTFT added by disaggregation, ms", added, f"{added:.1f}")
        if "transformers" in self.fulls:
            for name in sorted(self.fulls.keys() - {"transformers"}):
                ratio = self.tokens_per_s[name] / self.tokens_per_s["transformers"]
                yield _compared(f"tokens/s, {name} over transformers", ratio, f"{ratio:.2f}")
                equal = equal_share(self.fulls[name], self.fulls["transformers"])
                what = f"answers of full streams, {name} equal to transformers"
                yield _compared(what, equal, f"{equal:.0%}")

    def _prove(self, mode: Mode) -> None:
        """Check the responses before speed is reported.

        In bfloat16 a response may differ from the other system's after a few tokens, but rarely at
        the first one.

        Raises:
            RuntimeError: most first tokens differ from those of the previous system.
        """
        firsts = [[tokens[:1] for tokens in single] for single in self.singles.values()]
        if (equal := equal_share(firsts[0], firsts[-1])) < 0.5:
            raise RuntimeError(f"only {equal:.0%} of its first tokens are the other system's")

    def _flags(self) -> list[str]:
        setting = self.setting
        dtype = str(setting.dtype).removeprefix("torch.")
        return [
            f"--device={setting.device}",
            f"--dtype={dtype}",
            f"--engine.cache.num-pages={setting.sized(PAGES, DRY_PAGES)}",
            "--engine.cache.swap-pages=0",
            f"--engine.scheduler.chunked-prefill-tokens={setting.sized(CHUNK, DRY_CHUNK)}",
            f"--engine.scheduler.max-running-requests={2 * self.sizes.streams}",
        ]


def _compared(what: str, value: float, text: str) -> Row:
    return {"table": "compared", "what": what, "value": value, "text": text}


def _one_by_one(rows: AsyncIterator[Row]) -> Iterator[Row]:
    """Yield each row as soon as it is available. The event loop is stopped between two rows."""

    async def following() -> Row | None:
        return await anext(rows, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (row := runner.run(following())) is not None:
            yield row

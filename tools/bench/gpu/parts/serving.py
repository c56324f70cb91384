"""Part serving: a colocated and a disaggregated system on the device, compared with transformers.

All use one model, one machine, and the same prompts. With two devices, both are used. With one
device, the two nodes of the disaggregated system share it by the driver's time slices, so their ITL
shows the cost of sharing a device, not the gain of disaggregation.
"""

import asyncio
import operator
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvloop

from tools.bench.gpu.model.models import CONFIGS, SERVED, write_checkpoint
from tools.bench.gpu.process import Row, guarded
from tools.bench.gpu.setting import Setting
from tools.bench.gpu.systems import exposure
from tools.bench.gpu.systems.loads import LoadSizes, SystemLoads
from tools.bench.support import peer
from tools.bench.support.load import Answer, Client, summary
from tools.bench.support.systems import Mode, System, serving

SIZES = LoadSizes(
    vocabulary=CONFIGS[SERVED]["vocab_size"],
    prompt=2048,
    prompts=8,
    long_prompt=8192,
    streams=16,
    stream_prompt=256,
    stream_output=64,
    rounds=2,
)
DRY_SIZES = LoadSizes(
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
PEER = "transformers"
PEER_S = 150.0
WARM_UP_TOKENS = 8  # of transformers
MEMORY = Path("/dev/shm")  # the checkpoint is written, read once or twice, and deleted


def measure(setting: Setting) -> Iterator[Row]:
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-gpu-", dir=where) as directory:
        name = setting.sized(SERVED, "tiny")
        model = write_checkpoint(Path(directory), name, setting.device)
        bench = _Comparison(setting, model, setting.sized(SIZES, DRY_SIZES))
        if not setting.dry:
            torch.cuda.empty_cache()
        for mode in MODES:
            yield from guarded(f"{mode} system", _one_by_one(bench.system(mode)))
        yield from guarded(PEER, _one_by_one(bench.transformers()))
        yield from bench.compared()


@dataclass(slots=True, eq=False)
class _Comparison:
    """Measures one system after the other, and keeps the data to compare them, by system."""

    setting: Setting
    model: Path
    sizes: LoadSizes
    singles: dict[str, list[list[int]]] = field(default_factory=dict)  # tokens
    fulls: dict[str, list[list[int]]] = field(default_factory=dict)
    ttft_ms: dict[str, float] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)

    async def system(self, mode: Mode) -> AsyncIterator[Row]:
        """Yield all measurements of one system while it runs."""
        two = not self.setting.dry and torch.cuda.device_count() > 1
        devices = 1 if mode == "colocated" else 2 if two else "1, in turns"
        prefill_flags = ["--device=cuda:1"] if two else []
        async with (
            serving(mode, self.model, self._flags(), prefill_flags=prefill_flags) as system,
            Client(system.target) as client,
        ):
            loads = SystemLoads(client, self.sizes)
            async for row in self._loads(mode, loads):
                yield {"table": row.pop("table"), "system": mode, "devices": devices, **row}
            async for row in self._handoffs(system):
                yield row

    async def _loads(self, mode: Mode, loads: SystemLoads) -> AsyncIterator[Row]:
        await loads.warm_up()
        answers = await loads.single()
        self.singles[mode] = _tokens(answers)
        self._prove()
        ttft_ms = summary(answers)["ttft_ms"]
        self.ttft_ms[mode] = ttft_ms["p50"]
        table = "time to first token"
        yield {"table": table, "prompt": self.sizes.prompt, "ttft_ms": ttft_ms}
        quiet_ms = await loads.decoding()
        disturbed_ms, long_prompt_s = await loads.disturbed()
        yield {
            "table": "decode under prefill",
            "streams": self.sizes.streams,
            "quiet_ms": quiet_ms,
            "disturbed_ms": disturbed_ms,
            "long_prompt_ms": long_prompt_s * 1e3,
        }
        answers = await loads.full()
        yield self._full(mode, _tokens(answers), summary(answers))

    async def _handoffs(self, system: System) -> AsyncIterator[Row]:
        chunk, sizes = self.setting.sized(CHUNK, DRY_CHUNK), self.sizes
        for node in await system.nodes():
            if node.role == "prefill":
                given = sizes.vocabulary, chunk, sizes.long_prompt
                rows = exposure.measure(self.setting, self.model, node.address, *given)
                async for row in rows:
                    yield row

    async def transformers(self) -> AsyncIterator[Row]:
        jobs, streams = self.sizes.full(), self.sizes.streams
        device, dtype = str(self.setting.device), str(self.setting.dtype).removeprefix("torch.")
        async with peer.transformers(self.model, device, dtype, PEER_S) as ask:
            row = await ask(jobs, peer.shortened(jobs[:streams], WARM_UP_TOKENS), streams, 1)
        tokens = row.pop("token_ids")
        yield {"system": PEER, "devices": 1, **self._full(PEER, tokens, row)}

    def _full(self, system: str, tokens: list[list[int]], row: dict[str, Any]) -> Row:
        self.fulls[system], self.tokens_per_s[system] = tokens, row["tokens_per_s"]
        return {"table": "full streams", "streams": self.sizes.streams, **row}

    def compared(self) -> Iterator[Row]:
        """Compare all pairs of systems measured so far.

        In bfloat16, systems that batch differently may give different responses. Single prompts are
        batched alike.
        """
        first, second = MODES
        if {first, second} <= self.singles.keys():
            equal = _equal_share(self.singles[second], self.singles[first])
            yield _compared(f"single answers, {second} equal to {first}", equal)
            added = self.ttft_ms[second] - self.ttft_ms[first]
            yield _compared("TTFT added by disaggregation, ms", added)
        if PEER in self.fulls:
            for name in sorted(self.fulls.keys() - {PEER}):
                ratio = self.tokens_per_s[name] / self.tokens_per_s[PEER]
                yield _compared(f"tokens/s, {name} over {PEER}", ratio)
                equal = _equal_share(self.fulls[name], self.fulls[PEER])
                yield _compared(f"answers of full streams, {name} equal to {PEER}", equal)

    def _prove(self) -> None:
        """Check the responses before speed is reported.

        In bfloat16 a response may differ from the other system's after a few tokens, but rarely at
        the first one.

        Raises:
            RuntimeError: most first tokens differ from those of the previous system.
        """
        firsts = [[tokens[:1] for tokens in single] for single in self.singles.values()]
        if (equal := _equal_share(firsts[0], firsts[-1])) < 0.5:
            raise RuntimeError(f"only {equal:.0%} of its first tokens are the other system's")

    def _flags(self) -> list[str]:
        setting = self.setting
        return [
            f"--device={setting.device}",
            f"--dtype={str(setting.dtype).removeprefix('torch.')}",
            f"--engine.cache.num-pages={setting.sized(PAGES, DRY_PAGES)}",
            "--engine.cache.swap-pages=0",
            f"--engine.scheduler.chunked-prefill-tokens={setting.sized(CHUNK, DRY_CHUNK)}",
            f"--engine.scheduler.max-running-requests={2 * self.sizes.streams}",
        ]


def _compared(what: str, value: float) -> Row:
    return {"table": "compared", "what": what, "value": value}


def _tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def _equal_share(answers: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Return the share of responses whose tokens all equal the other system's."""
    equal: int = sum(map(operator.eq, answers, others))
    return equal / len(answers)


def _one_by_one(rows: AsyncIterator[Row]) -> Iterator[Row]:
    """Yield each row as soon as it is available. The event loop is stopped between two rows."""

    async def following() -> Row | None:
        return await anext(rows, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (row := runner.run(following())) is not None:
            yield row

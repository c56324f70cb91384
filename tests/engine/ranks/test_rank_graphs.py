"""Ranks warm up, measure and capture graphs of steps together. Threads stand in for the ranks,
and graphs execute their work again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from common.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine import build as engine_build
from engine import footprint as footprint_module
from engine import load as engine_load
from engine.adapters.adapters import bank_of, no_adapters
from engine.build import plan
from engine.footprint import MemoryFootprint, measure_footprint
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import LoadableModel, open_checkpoint
from engine.models.decoder import Decoder
from engine.models.spec import LoadTarget
from engine.ranks import WHOLE, Share
from engine.ranks.messages import RankJob, ReplaceHostPages
from engine.runner.forwards import Forwards
from engine.runner.runner import ModelRunner
from engine.runner.stream import WorkerStream
from engine.sizing import NCCL_BYTES, part_of, resolve_shape
from tests.engine.start.test_footprint import FakeGpu
from tests.support.engine.steps import Steps, prompt
from tests.support.engine.thread_ranks import Meeting, ThreadGroup, followed, run_ranks
from tests.support.hardware.tapes import RepeatRecorder
from tests.support.models.checkpoints import make_checkpoint, read_spec
from tests.support.models.drafters import make_mtp

CPU = torch.device("cpu")
GIB = 1 << 30
MTP = SpeculativeConfig(method="mtp")


def rows_of(recorder: RepeatRecorder) -> list[int]:
    return [rows for rows, _ in recorder.replays]


@dataclass(frozen=True)
class TwoRanks:
    """The steps of rank 0, which a follower runs too.

    Attributes:
        graphs: by rank.
        send: sends a packet to the follower.
    """

    steps: Steps
    graphs: tuple[RepeatRecorder, RepeatRecorder]
    send: Callable[[bytes], None]

    def capture(self) -> None:
        self.steps.capture_all()


@contextmanager
def two_ranks(loadable: LoadableModel) -> Iterator[TwoRanks]:
    meeting = Meeting(2)
    shares = [Share(rank, 2, ThreadGroup(rank, meeting)) for rank in range(2)]
    models = [loadable.load(LoadTarget(CPU, torch.float32, share=share)) for share in shares]
    graphs = RepeatRecorder(), RepeatRecorder()
    steps = Steps(models[0], share=shares[0], recorder=graphs[0])
    sizes = steps.runner.builder.sizes(models[0].spec)
    spec = models[1].spec
    layout = part_of(KVLayout.of(spec.layers, 16, torch.float32, None, spec.draft), shares[1])
    pools = KVPool(layout, steps.pool.num_pages, CPU), HostPool(layout, 0, CPU)
    bank, stream = no_adapters(steps.table).bank, WorkerStream()
    jobs: Any = SimpleNamespace(
        adapter=None,
        with_host_pages=lambda number, num_pages, forwards: forwards.with_same_graphs(
            HostPool(layout, 0, CPU)
        ),
    )

    first = steps.runner.forwards
    assert isinstance(first, Forwards)
    second = Forwards(models[1], *pools, bank, stream, sizes, graphs[1])
    with followed(first, second, meeting, jobs) as (leading, sender):
        steps.runner = ModelRunner(steps.runner.builder, leading)
        yield TwoRanks(steps, graphs, sender.send)
        steps.close()
    stream.close()


def test_ranks_replay_graphs_in_step(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 20, 33))]
    alone = Steps(open_checkpoint(directory).load(LoadTarget(CPU, torch.float32, share=WHOLE)))
    expected = alone.generate(prompts, 8)
    alone.close()
    expected_sizes = [6, 24, 48, *[4] * 7]  # prompts, then decode steps
    with two_ranks(open_checkpoint(directory)) as ranks:
        steps, (ours, theirs) = ranks.steps, ranks.graphs
        ranks.capture()
        steps.runner.rehearse(60)
        assert steps.generate(prompts, 8) == expected
        assert rows_of(ours) == rows_of(theirs) == expected_sizes
        # Another role has its own graphs and host pages.
        again = RepeatRecorder()
        steps.runner = steps.runner.with_host_pool(steps.host_pool, again)
        ranks.capture()
        ranks.send(msgspec.msgpack.encode(RankJob(0, ReplaceHostPages(0))))
        assert steps.generate(prompts, 8) == expected
        assert rows_of(again) == expected_sizes == rows_of(theirs)[len(expected_sizes) :]


def test_ranks_warm_up_drafts_together(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "deepseek_v3")
    make_mtp(directory)
    with two_ranks(open_checkpoint(directory, "auto", MTP)) as ranks:
        ranks.steps.runner.rehearse(60)


@pytest.mark.parametrize("drafts", [False, True])
def test_ranks_measure_the_memory_of_steps_together(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges of different tensors would fail, and one that a rank leaves out would not end."""
    directory = make_checkpoint(tmp_path, "deepseek_v3" if drafts else "qwen3")
    if drafts:
        make_mtp(directory)
    FakeGpu(monkeypatch)
    monkeypatch.setattr(footprint_module, "CudaRecorder", RepeatRecorder)
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        speculative=MTP if drafts else SpeculativeConfig(),
        parallel=ParallelConfig(tp=2),
        scheduler=SchedulerConfig(chunked_prefill_tokens=32, max_running_requests=4),
    )
    loadable = open_checkpoint(directory, "auto", config.speculative)

    def measure(share: Share) -> MemoryFootprint:
        model = loadable.load(LoadTarget(CPU, torch.float32, share=share))
        assert isinstance(model, Decoder)
        model.compute_in_one_way()  # as on a GPU, where no latents are expanded
        shape = resolve_shape(config, model.spec, dtype=torch.float32, free=GIB, share=share)
        bank = bank_of(config.lora, model, free=0)
        max_drafts = config.speculative.max_drafts
        return measure_footprint(
            model, shape, bank, max_running=4, max_drafts=max_drafts, graphs=True
        )

    one, other = run_ranks(2, measure)
    assert one.graphs == other.graphs > 0


# Seen failing without each of the two minima, and without the share of the last shape.
@pytest.mark.parametrize("least", ["ours", "theirs", "theirs later"])
def test_every_rank_has_as_many_pages_as_fit_on_all(
    least: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(make_checkpoint(tmp_path, max_position_embeddings=1 << 20))
    room = {"ours": 4 * GIB, "theirs": 4 * GIB, "theirs later": 4 * GIB}
    room[least] = GIB
    asked = []
    followers = SimpleNamespace(
        free_bytes=room["theirs"], measure=asked.append, measured=lambda: room["theirs later"]
    )
    model = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, spec=spec)
    model.seeing = None
    share = Share(0, 2)
    loaded: Any = SimpleNamespace(model=model, share=share, followers=followers, bank=None)
    monkeypatch.setattr(engine_load, "free_bytes", lambda *_: room["ours"] + NCCL_BYTES)
    monkeypatch.setattr(
        engine_build, "measure_footprint", lambda *_, **__: MemoryFootprint(0, 0, 0)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda:0-1",
        cache=CacheConfig(swap_pages=0),
        parallel=ParallelConfig(tp=2),
    )
    shape = plan(config, loaded)
    assert asked == [min(room["ours"], room["theirs"])]
    assert 2 * shape.layout.page_bytes == shape.whole.page_bytes
    # The memory of the first case limits only the activations of a step.
    last = min(room["ours"], room["theirs later"])
    assert shape.num_pages == last // shape.layout.page_bytes

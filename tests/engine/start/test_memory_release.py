"""Released memory is returned to the system, and restored content is right."""

import re
import signal
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig, SpeculativeConfig
from common.errors import ConfigError, EngineFault, FailedPrecondition
from common.requests.namespace import UNNAMED
from engine.batch.images import VisibleImage
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.pages import PageAllocator
from engine.load import open_model
from engine.memory_release import MemoryOccupation, memory_of
from engine.models import content, load, open_checkpoint, stored_of
from engine.models.refill import found, relocated
from engine.models.spec import LoadTarget
from engine.rank_jobs import MemoryOfRanks
from engine.ranks import Share
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.messages import ReleasePools, RestorePools
from engine.sizing import free_bytes
from engine.update import WeightsInMemory, WeightUpdater
from kernels.cpu.memory import empty_in_huge_pages, release_memory, take
from tests.engine.models.test_model_precision import logits_of
from tests.engine.models.test_updated_weights import CPU, SOME, TOKENS, int8
from tests.engine.runner.test_pools import LAYOUT
from tests.support.hardware.virtual_memory import GARBAGE, UNIT, host_memory
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.drafters import make_eagle
from tests.support.models.vision import make_vision_checkpoint, picture
from tests.support.processes import fork_server

MIB = 1 << 20


def own_bytes() -> int:
    """Return the memory of this process that is not backed by a file."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize(
    "make", [lambda n: empty_in_huge_pages((n,), torch.uint8), lambda n: torch.empty(n).byte()]
)
def test_a_tensor_without_its_memory_keeps_its_place(make):
    tensor = make(96 * MIB)
    tensor.fill_(7)
    address, before = tensor.data_ptr(), own_bytes()
    release_memory(tensor)
    assert own_bytes() < before - 64 * MIB
    assert tensor.data_ptr() == address and not tensor[MIB : 2 * MIB].any()
    tensor.fill_(9)
    assert own_bytes() > before - 64 * MIB and tensor.min() == 9


def test_restored_memory_is_allocated_before_it_is_written_and_keeps_its_content():
    tensor = empty_in_huge_pages((96 * MIB,), torch.uint8)
    tensor[:100] = 7
    before = own_bytes()
    take(tensor.data_ptr() + 50, 96 * MIB - 50)
    assert own_bytes() > before + 64 * MIB
    assert bool((tensor[:100] == 7).all()) and not tensor[100 : 2 * MIB].any()
    take(8, 8)  # outside of all tensors


def test_the_ends_of_a_tensor_do_not_share_pages_with_other_memory():
    around = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    inner = torch.frombuffer(memoryview(around.numpy())[100 : 2 * MIB + 100], dtype=torch.uint8)
    release_memory(inner)
    assert bool((around[:100] == 7).all()) and bool((around[2 * MIB + 100 :] == 7).all())


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3_next", "deepseek_v2"])
@pytest.mark.parametrize(
    "dtype, quantize",
    [
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        pytest.param(torch.float32, "int8", marks=int8),
    ],
)
def test_a_model_with_restored_weights_computes_the_same(tmp_path, architecture, dtype, quantize):
    loadable = open_checkpoint(make_checkpoint(tmp_path, architecture))
    model = loadable.load(LoadTarget(CPU, dtype, quantize))
    before = logits_of(model, TOKENS)
    loadable.drain(model)
    loadable.refill(model)
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_weights_take_no_memory(tmp_path, dtype):
    directory = make_checkpoint(
        tmp_path, "qwen3", hidden_size=512, intermediate_size=8192, num_hidden_layers=3
    )
    loadable = open_checkpoint(directory)
    model = load(directory, CPU, dtype)
    num_bytes = loadable.weight_bytes(LoadTarget(CPU, dtype))
    assert num_bytes > 64 * MIB
    before = own_bytes()
    loadable.drain(model)
    assert own_bytes() < before - 0.8 * num_bytes


def test_an_image_without_the_encoders_weights_is_a_clear_error(tmp_path):
    pytest.importorskip("PIL")
    loadable = open_checkpoint(make_vision_checkpoint(tmp_path))
    model = loadable.load(LoadTarget(CPU, torch.float32))
    loadable.drain(model)
    seen = VisibleImage(picture(2, 2, 1), first=0, last=4, place=0)
    with pytest.raises(EngineFault, match="the encoder's weights are released"):
        model.seeing.embed([seen], torch.zeros(4, loadable.spec.image_token_size))


# Memory in regions, as on a GPU -------------------------------------------------------------------


def spoiled(tensors):
    """Return a function that overwrites the memory that these tensors have now."""
    before = [each.untyped_storage() for each in tensors]

    def spoil() -> None:
        for each in before:
            torch.empty(0, dtype=torch.uint8).set_(each).fill_(GARBAGE)

    return spoil


def moved(loadable, model, memory=None):
    """Move a model's weights into a region. Nothing uses the memory that they had before."""
    tensors = list(loadable.tensors(model))
    spoil = spoiled(tensors)
    region = relocated(tensors, memory or host_memory())
    spoil()
    for each in tensors:
        inside = each.data_ptr() - region.address
        assert inside >= 0 and inside + each.nbytes <= region.num_bytes
    return region


MODELS = {
    **{name: name for name in SOME},
    "transformers": "llama",
    "vision": "qwen2_5_vl",
    "eagle": "llama",
    "draft_model": "llama",
}


def opened(kind: str, directory: Path):
    """Open a checkpoint of this architecture."""
    if kind == "vision":
        return open_checkpoint(make_vision_checkpoint(directory, model_type=MODELS[kind]))
    path = make_checkpoint(directory / "model", MODELS[kind])
    if kind == "eagle":
        drafter = make_eagle(directory / "drafter", path)
    else:
        drafter = make_checkpoint(directory / "drafter", MODELS[kind], seed=1)
    if kind in ("eagle", "draft_model"):
        speculation = SpeculativeConfig(method=kind, draft_model=str(drafter))
        return open_checkpoint(path, speculation=speculation)
    return open_checkpoint(path, "transformers" if kind == "transformers" else "auto")


@pytest.mark.parametrize("kind", MODELS)
def test_weights_in_a_region_compute_the_same_before_and_after_a_release(tmp_path, kind):
    loadable = opened(kind, tmp_path)
    model = loadable.load(LoadTarget(CPU, torch.float32))
    before, shown = logits_of(model, TOKENS), [each.clone() for each in loadable.tensors(model)]
    region = moved(loadable, model)
    if kind == "vision":
        (first, *_) = model.seeing._encoder._model.parameters()
        assert 0 <= first.data_ptr() - region.address < region.num_bytes
    if kind == "draft_model":
        (first, *_) = found(torch.Tensor, [*model.drafter.decoder.parts])
        assert 0 <= first.data_ptr() - region.address < region.num_bytes
    addresses = [each.data_ptr() for each in loadable.tensors(model)]
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0.0, rtol=0.0)
    loadable.drain(model)
    region.release()
    region.map()
    loadable.refill(model)
    assert [each.data_ptr() for each in loadable.tensors(model)] == addresses
    for each, expected in zip(loadable.tensors(model), shown, strict=True):
        assert torch.equal(each, expected)
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0.0, rtol=0.0)


def test_tensors_that_shared_memory_still_share_it():
    whole = torch.arange(24.0).view(4, 6)
    row, turned, other = whole[1], whole.T, torch.ones(3, dtype=torch.bfloat16)
    region = relocated([row, whole, other, turned, whole, torch.empty(0)], host_memory())
    assert torch.equal(turned, torch.arange(24.0).view(4, 6).T) and turned.stride() == (1, 6)
    row.fill_(7)
    assert bool((whole[1] == 7).all()) and bool((turned[:, 1] == 7).all())
    assert region.address == whole.data_ptr() and region.num_bytes == UNIT


def test_a_region_for_weights_allocates_memory_as_needed():
    memory = host_memory()
    held = []
    tensors = [torch.ones(40 << 20, dtype=torch.uint8) for _ in range(4)]
    memory.driver.fails = lambda name, number: name == "create" and held.append(memory.mapped_bytes)
    region = relocated(tensors, memory)
    assert [each >> 20 for each in held] == [0, 64, 128]
    assert region.mapped_bytes == 160 << 20 and all(bool(each.all()) for each in tensors)


def compute_without_weights(directory):
    loadable = open_checkpoint(Path(directory))
    model = loadable.load(LoadTarget(CPU, torch.float32))
    region = relocated(loadable.tensors(model), host_memory())
    logits_of(model, TOKENS)
    region.release()
    print("released", flush=True)
    logits_of(model, TOKENS)


def test_a_step_without_weights_is_an_error(tmp_path):
    ended = fork_server.run(__spec__.name, str(make_checkpoint(tmp_path)))
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "released\n"), ended.stderr


@pytest.fixture
def update(tmp_path):
    """Yield the weights of a model in a region, and its memory."""
    directory = make_checkpoint(tmp_path)
    served = open_checkpoint(directory)
    model = served.load(LoadTarget(CPU, torch.float32))
    memory = host_memory()
    region = moved(served, model, memory)
    config, weights = EngineConfig(model=str(directory)), content(stored_of(served, directory))
    memory_of_weights = WeightsInMemory(model, served, region=region)
    made = WeightUpdater(config, directory, weights, memory_of_weights)
    yield made, model, memory
    made.close()


def test_weights_that_do_not_fit_are_restored_later(update):
    weights, model, memory = update
    before = logits_of(model, TOKENS)
    weights.release().result(60)
    assert memory.mapped_bytes == 0 and not weights.whole
    memory.driver.total = 0
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match=r"weights: 0\.00 GiB are needed, 0\.00 GiB"):
            weights.restore().result(60)
        assert memory.mapped_bytes == 0 and not weights.whole
    memory.driver.total = 1 << 30
    weights.restore().result(60)
    assert weights.whole
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0.0, rtol=0.0)


def test_memory_is_released_again_if_the_weights_cannot_be_read(update, monkeypatch):
    weights, _, memory = update
    weights.release().result(60)

    def fail(*_: object) -> None:
        raise OSError("the disk has failed")

    with monkeypatch.context() as patched:
        patched.setattr(weights._source.loadable, "refill", fail)
        with pytest.raises(FailedPrecondition, match="the disk has failed"):
            weights.restore().result(60)
    assert memory.mapped_bytes == 0 and not weights.whole
    weights.restore().result(60)
    assert weights.whole and memory.mapped_bytes > 0


class Peers:
    """Other nodes, and the order in which things happen."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.fails = False

    def close(self) -> None:
        self._log.append("close")

    def open(self) -> None:
        self._log.append("open")
        if self.fails:
            raise ConfigError("no data path")


class Others:
    """The other ranks, see Followers."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.fails = False

    def ask(self, job: ReleasePools | RestorePools) -> Future[None]:
        restores = isinstance(job, RestorePools)
        self._log.append("restore of ranks" if restores else "release of ranks")
        done: Future[None] = Future()
        if restores and self.fails:
            done.set_exception(EngineFault("no memory"))
        else:
            done.set_result(None)
        return done


class Occupation:
    def __init__(self) -> None:
        self.memory = host_memory(total=64 * UNIT)
        self.pool = KVPool(LAYOUT, 5, CPU, self.memory)
        log = self.memory.driver.log
        self.peers, self.others = Peers(log), Others(log)
        own = memory_of(self.pool, HostPool(LAYOUT, 1, CPU))
        memory = MemoryOfRanks(own, self.others)  # type: ignore[arg-type]
        given = None, PageAllocator(5), memory, "", lambda: None, self.peers
        self.made = MemoryOccupation(*given)  # type: ignore[arg-type]
        log.clear()

    @property
    def log(self) -> list[str]:
        """Return the calls since the last time."""
        log = self.memory.driver.log
        found = [each for each in log if each not in ("settle", "release", "create")]
        log.clear()
        return found


@pytest.fixture
def occupation():
    made = Occupation()
    yield made
    made.made.close()


def test_pages_in_a_region_are_those_of_the_layout(occupation):
    pool = occupation.pool
    assert pool.base_address == pool.region.address and pool.tensor.shape == (5, LAYOUT.page_bytes)
    assert pool.layers[0].data_ptr() >= pool.base_address


def test_peers_are_closed_before_pages_are_released_and_opened_after_their_return(occupation):
    made = occupation.made
    assert made.isolates
    made.isolate().result(60)
    made.release("kv_cache").result(60)
    assert occupation.log == ["close", "release of ranks", "unmap"]
    made.restore("kv_cache").result(60)
    assert occupation.log == ["map", "allow", "restore of ranks", "open"]
    occupation.pool.tensor.fill_(7)


@pytest.mark.parametrize("what", ["memory", "others", "peers"])
def test_pages_that_cannot_be_restored_leave_no_allocation(occupation, what):
    made, memory = occupation.made, occupation.memory
    made.isolate().result(60)
    made.release("kv_cache").result(60)
    others_fail, peers_fail = what == "others", what == "peers"
    for _ in range(2):
        occupation.others.fails, occupation.peers.fails = others_fail, peers_fail
        memory.driver.total = 0 if what == "memory" else 64 * UNIT
        with pytest.raises(FailedPrecondition, match=r"kv_cache: (0\.00|no memory|no data path)"):
            made.restore("kv_cache").result(60)
        assert memory.mapped_bytes == 0 and not memory.driver.handles
        assert occupation.log[-2 if what != "memory" else -1] == "release of ranks"
    occupation.others.fails = occupation.peers.fails = False
    memory.driver.total = 64 * UNIT
    made.restore("kv_cache").result(60)
    assert occupation.log == ["map", "allow", "restore of ranks", "open"]


def test_a_pool_that_does_not_fit_is_rejected_at_start():
    with pytest.raises(ConfigError, match="not enough memory for a KV pool"):
        KVPool(LAYOUT, 5, CPU, host_memory(total=0))


def test_memory_in_regions_counts_as_this_processs(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (50 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: 10 << 30)
    memory = host_memory()
    monkeypatch.setattr("engine.sizing.virtual_memory", lambda index: memory)
    before = free_bytes(device, 0.5)
    memory.reserve(8 * UNIT).map()
    assert free_bytes(device, 0.5) == before - 8 * UNIT


def test_the_option_is_rejected_on_a_cpu(tmp_path):
    config = EngineConfig(model=str(tmp_path), device="cpu", memory_saver=True)
    with pytest.raises(ConfigError, match=r"engine\.memory_saver is for GPUs"):
        open_model(config)


# Seen failing while the weights of a node without other ranks were read again as the whole model.
def test_the_experts_of_a_node_in_a_data_parallel_group_come_back(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3_moe")
    served, share = open_checkpoint(directory), Share(exchange=ExpertExchange(0, 2))
    model = served.load(LoadTarget(CPU, torch.float32, share=share))
    before = [each.clone() for each in served.tensors(model)]
    config, weights = EngineConfig(model=str(directory)), content(stored_of(served, directory))
    update = WeightUpdater(config, directory, weights, WeightsInMemory(model, served))
    update.release().result(60)
    update.restore().result(60)
    assert update.whole and all(map(torch.equal, served.tensors(model), before))
    update.close()


def test_weights_on_a_gpu_without_a_region_are_kept(tmp_path):
    directory = make_checkpoint(tmp_path)
    served = open_checkpoint(directory)
    model = served.load(LoadTarget(CPU, torch.float32))
    model.device = torch.device("cuda", 0)
    config, memory = EngineConfig(model=str(directory)), WeightsInMemory(model, served)
    update = WeightUpdater(config, directory, UNNAMED, memory)
    with pytest.raises(FailedPrecondition, match=r"--engine\.memory-saver"):
        update.check_drainable()
    update.close()


if __name__ == "__main__":
    compute_without_weights(sys.argv[1])

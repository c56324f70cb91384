"""Checks of a machine's CUDA before an engine is built, and pinning of host memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    PrefillConfig,
    SchedulerConfig,
)
from common.errors import ConfigError
from engine import build as engine_build
from engine import load as engine_load
from engine import sizing
from engine.kv_cache.kv import HostPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from engine.load import with_collectives
from engine.ranks import Share
from engine.runner import gpu
from engine.runner.gpu import use_gpu
from engine.sizing import resolve_device, resolve_shape
from kernels import early_launch
from node import engine_main as node_engine
from tests.support.models.checkpoints import make_checkpoint, read_spec

CUDA = torch.device("cuda", 0)
LAYOUT = KVLayout.of((PagedKV(1, 8),) * 2, 16, torch.bfloat16)


def has(monkeypatch, *, complaint=None, gpus=1):
    """Return a torch with CUDA on a machine with GPUs, or one whose `torch.cuda.init` fails."""

    def init():
        raise RuntimeError(complaint)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: complaint is None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if complaint else gpus)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_an_unusable_gpu_is_an_error_with_torchs_message(monkeypatch, name):
    complaint = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"
    has(monkeypatch, complaint=complaint)
    with pytest.raises(ConfigError, match=r"driver on your system is too old .*12020") as error:
        resolve_device(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "complaint",
    [
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.",
        "No CUDA GPUs are available",
    ],
)
def test_a_machine_without_a_gpu_uses_its_cpu(monkeypatch, complaint):
    has(monkeypatch, complaint=complaint)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="cuda:0 does not exist"):
        resolve_device("cuda:0")


def test_a_torch_without_cuda_uses_the_cpu(monkeypatch):
    has(monkeypatch, complaint="Torch not compiled with CUDA enabled")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize(
    "name, expected",
    [("auto", [0, 1, 2]), ("cuda", [0, 1, 2]), ("cuda:1-3", [1, 2, 3]), ("cuda:2,0-1", [2, 0, 1])],
)
def test_each_rank_has_the_gpu_of_its_number(monkeypatch, name, expected):
    has(monkeypatch, gpus=4)
    EngineConfig(model="m", device=name, parallel=ParallelConfig(tp=3))
    assert [resolve_device(name, rank).index for rank in range(3)] == expected


def test_ranks_on_a_cpu_have_one_device(monkeypatch):
    has(monkeypatch, complaint="No CUDA GPUs are available")
    assert {resolve_device(name, rank).type for name in ("auto", "cpu") for rank in (0, 3)} == {
        "cpu"
    }


def test_a_rank_without_a_gpu_is_rejected(monkeypatch):
    has(monkeypatch, gpus=2)
    with pytest.raises(ConfigError, match="cuda:2 does not exist, this machine has 2 CUDA devices"):
        resolve_device("auto", 2)
    for wrong in ("cuda:3-1", "cuda:1,", "cuda:-1"):
        with pytest.raises(ConfigError, match="is not a device"):
            resolve_device(wrong)


@pytest.mark.parametrize(
    "device, tp, error",
    [
        ("cuda:0", 2, "cuda:0 is 1, .* is 2: each rank needs one, as in cuda:0-1 "),
        ("cuda:0-3", 2, "cuda:0-3 is 4, .*pp is 2"),
        ("cuda:0-1", 1, "cuda:0-1 is 2, .* is 1: each rank needs one, as in cuda:0 "),
        ("cuda:0-1,1", 3, "cuda:0-1,1 names a GPU twice"),
    ],
)
def test_different_numbers_of_gpus_and_ranks_are_rejected(device, tp, error):
    with pytest.raises(ValueError, match=error):
        EngineConfig(model="m", device=device, parallel=ParallelConfig(tp=tp))


@pytest.mark.parametrize(
    "device, collectives, expected",
    [("cpu", "auto", "shm"), ("cpu", "gloo", "gloo"), ("cuda", "auto", "nccl")],
)
def test_collectives_are_chosen_by_the_device(monkeypatch, device, collectives, expected):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    parallel = ParallelConfig(tp=2, collectives=collectives)
    config = EngineConfig(model="m", parallel=parallel)
    assert with_collectives(config, torch.device(device)).collectives == expected
    assert with_collectives(config, torch.device(device)).tp == 2


@pytest.mark.parametrize(
    "device, collectives, error",
    [
        ("cpu", "nccl", "nccl is for ranks on GPUs, and engine.device is cpu"),
        ("cuda", "shm", "shm is for ranks on CPUs, and engine.device is cuda"),
        ("cuda", "gloo", "gloo is for ranks on CPUs"),
        ("cuda", "auto", "this torch is built without NCCL"),
    ],
)
def test_collectives_that_a_device_does_not_support_are_rejected(
    monkeypatch, device, collectives, error
):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    config = EngineConfig(model="m", parallel=ParallelConfig(tp=2, collectives=collectives))
    with pytest.raises(ConfigError, match=f"engine.parallel.collectives: {error}"):
        with_collectives(config, torch.device(device))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_memory_that_no_other_process_could_map_is_rejected_by_name(monkeypatch, name, device):
    has(monkeypatch)
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8, expandable_segments: True")
    with pytest.raises(ConfigError, match=f"{name}: expandable_segments"):
        resolve_device(device)
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setenv(name, "expandable_segments:False,max_split_size_mb:64")
    assert resolve_device(device) == CUDA


def test_sums_of_products_are_not_rounded_to_sixteen_bits_in_between(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    try:
        use_gpu(CUDA)
        assert not any(getattr(matmul, name) for name in names)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
    assert chosen == [CUDA]


@pytest.mark.parametrize(
    "capability, driver, wanted, said",
    [
        ((9, 0), 12030, True, "launch is on"),
        ((12, 0), 13000, True, "launch is on"),
        ((8, 9), 13000, True, "compute capability 8.9 is below 9.0"),
        ((9, 0), 12020, True, "the driver supports CUDA 12.2, not 12.3"),
        ((9, 0), 0, True, "the driver supports CUDA 0.0, not 12.3"),
        ((9, 0), 13000, False, "engine.early_launch is off"),
    ],
)
def test_kernels_start_early_if_the_gpu_and_its_driver_support_it(
    monkeypatch, caplog, capability, driver, wanted, said
):
    caplog.set_level("INFO")
    monkeypatch.setattr(early_launch, "ENABLED", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gpu, "_driver_version", lambda: driver)
    gpu.choose_early_launch(CUDA, wanted=wanted)
    assert (said == "launch is on") == early_launch.ENABLED
    assert said in caplog.text


def test_the_thread_that_builds_an_engine_selects_its_gpu_first(monkeypatch):
    class ChosenError(Exception):
        pass

    def use_gpu(device):
        assert device == CUDA
        raise ChosenError

    has(monkeypatch)
    monkeypatch.setattr(engine_load, "use_gpu", use_gpu)
    with pytest.raises(ChosenError):
        engine_build.build(EngineConfig(model="nowhere", device="cuda:0"))


class FakeRuntime:
    """A fake of torch's CUDA runtime that records the memory to pin."""

    def __init__(self, result=0):
        self.pinned = {}
        self._result = result

    def cudaHostRegister(self, address, num_bytes, flags):
        self.pinned[address] = num_bytes
        return self._result

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


def test_host_pages_for_a_gpu_are_pinned_in_place_and_no_other_byte(monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = HostPool(LAYOUT, 35, CUDA)
    num_bytes = 35 * LAYOUT.page_bytes
    assert runtime.pinned == {pool.tensor.data_ptr(): num_bytes}
    assert pool.tensor.nbytes == num_bytes
    assert pool.tensor.data_ptr() % (2 << 20) == 0  # of huge pages
    pool.tensor.fill_(1.0)
    del pool
    assert runtime.pinned == {}


def test_host_pages_that_cannot_be_pinned_are_an_error_that_names_the_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(result=2))
    with pytest.raises(
        ConfigError, match=r"pinned \(CUDA error 2\); lower engine\.cache\.swap_pages"
    ):
        HostPool(LAYOUT, 4, CUDA)


def test_empty_host_pages_and_those_of_a_cpu_are_not_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("asked to pin"))
    assert HostPool(LAYOUT, 0, CUDA).tensor.shape[0] == 0
    assert HostPool(LAYOUT, 3, torch.device("cpu")).tensor.shape[0] == 3


@pytest.mark.parametrize(("left_gib", "pinned_gib"), [(100, 4), (8, 2)])
def test_a_gpu_has_four_gib_of_host_pages_and_at_most_a_quarter_of_free_memory(
    tmp_path, monkeypatch, left_gib, pinned_gib
):
    has(monkeypatch)
    monkeypatch.setattr(sizing, "free_bytes", lambda _, fraction: int(fraction * left_gib) << 30)
    spec = read_spec(make_checkpoint(tmp_path, max_position_embeddings=1 << 20))
    config = EngineConfig(model=str(tmp_path), device="cuda:0")
    shape = resolve_shape(config, spec, dtype=torch.bfloat16, free=80 << 30)
    assert shape.host_pages == (pinned_gib << 30) // shape.layout.page_bytes
    ranks = {"parallel": ParallelConfig(tp=2), "device": "cuda:0-1"}
    two = config.model_copy(update=ranks)
    half = resolve_shape(two, spec, dtype=torch.bfloat16, free=80 << 30, share=Share(0, 2))
    assert half.host_pages == shape.host_pages  # of half the size
    asked = CacheConfig(swap_pages=5_000_000)
    config = config.model_copy(update={"cache": asked})
    shape = resolve_shape(config, spec, dtype=torch.bfloat16, free=80 << 30)
    assert shape.host_pages == 5_000_000


@pytest.mark.parametrize(
    "role, asked, free_gib, chunk_tokens",
    [
        ("decode", {}, 60, 2048),
        ("prefill", {}, 60, 8192),
        ("prefill", {}, 8, 5040),  # 104 KiB for each token
        ("prefill", {}, 0.5, 2048),
        ("prefill", {"auto_chunk_tokens": 4096}, 60, 4096),
        ("decode", {"auto_chunk_tokens": 4096}, 60, 4096),
        ("prefill", {"chunked_prefill_tokens": 512}, 60, 512),
    ],
)
def test_chunks_are_larger_on_prefill_nodes_with_room(
    tmp_path, monkeypatch, role, asked, free_gib, chunk_tokens
):
    """With the widths of Llama 3 8B in two layers."""
    has(monkeypatch)
    monkeypatch.setattr(sizing, "free_bytes", lambda *_: 1 << 30)
    spec = read_spec(make_checkpoint(tmp_path))
    spec = replace(spec, hidden_size=4096, products_per_token=len(spec.layers) * 218_103_808)
    wanted = EngineConfig(
        model=str(tmp_path),
        device="cuda:0",
        cache=CacheConfig(num_pages=4),
        scheduler=SchedulerConfig(**asked),
    )
    config = node_engine.load_roles()[role].wants(wanted)
    shape = resolve_shape(config, spec, dtype=torch.bfloat16, free=int(free_gib * 2**30))
    assert shape.chunk_tokens == shape.prefill_tokens == chunk_tokens


def test_a_prefill_node_has_no_host_pages_and_captures_no_graphs(monkeypatch):
    class BuiltError(Exception):
        pass

    def build(config, *others):
        assert config.cache.swap_pages == 0 and not config.cuda_graphs
        assert config.cache.num_pages == 77
        raise BuiltError

    monkeypatch.setattr(node_engine, "build", build)
    asked = EngineConfig(model="m", cache=CacheConfig(num_pages=77, swap_pages=9))
    start = SimpleNamespace(role="prefill", config=PrefillConfig(engine=asked), channel=None)
    with pytest.raises(BuiltError):
        node_engine.body(lambda first: start, None)

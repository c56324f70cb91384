"""Pages and weights in memory that is inaccessible while it is released, like that of a GPU.

Any access is a SIGSEGV, which ends the test run. Memory contains NaN when it is restored.
"""

import threading
from contextlib import contextmanager

import pytest

from common.config import PrefixSharingConfig
from common.request import PrefixHint
from kvtransfer.messages import ReadsDone
from kvtransfer.transfer import sides
from node.messages import (
    PrepareRole,
    ReleaseMemory,
    ResumeMemory,
    TakeWeights,
)
from tests.pair.cache.test_prefix_sharing import prompt
from tests.pair.cache.test_sleep_mode import ALL, asleep, released, taken_again
from tests.pair.models.test_weight_updates import PROMPT, ask, greedy, pause, shelf
from tests.pair.operations.test_pauses import call_node, computes_nothing, resumed
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.hardware.devices import use
from tests.support.hardware.virtual_memory import host_memory
from tests.support.network.loopback import LoopbackBackend, LoopbackConnection

__all__ = ["greedy", "shelf"]  # fixtures


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Operations compiled for a CPU keep weights in their own format, outside of the regions."""
    use("torch", monkeypatch)


@pytest.fixture
def log(monkeypatch):
    """Return the calls of all drivers and of the network, in order."""
    made: list[str] = []

    def noted(owner: type, method: str, name: str) -> None:
        real = getattr(owner, method)

        def noting(*given, **options):
            result = real(*given, **options)
            made.append(name)
            return result

        monkeypatch.setattr(owner, method, noting)

    noted(LoopbackBackend, "serve", "serve")
    noted(LoopbackBackend, "end", "stop serving")
    noted(LoopbackBackend, "connect", "connect")
    noted(LoopbackConnection, "close", "disconnect")
    return made


@contextmanager
def rig_of(shelf, log, **options):
    def size() -> Size:
        memory = host_memory()
        memory.driver.log = log
        return Size(weights_dir=shelf, memory=memory)

    num_prefill, num_decode = options.pop("prefill", 1), options.pop("decode", 1)
    loaded = Loaded.from_directory(shelf / "old")
    with PairRig(
        loaded,
        prefill=[size() for _ in range(num_prefill)],
        decode=[size() for _ in range(num_decode)],
        own_models=True,
        **options,
    ) as rig:
        yield rig


@pytest.fixture
def rig(shelf, log):
    with rig_of(shelf, log) as rig:
        yield rig


def memory_of(node):
    return node.engine.pool.region._memory


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), ALL])
def test_nodes_respond_correctly_after_their_memory_was_released(rig, greedy, tags):
    addresses = [node.engine.pool.base_address for node in rig.nodes]
    whole = [memory_of(node).mapped_bytes for node in rig.nodes]
    with asleep(rig, greedy, tags):
        for node, before in zip(rig.nodes, whole, strict=True):
            left = 0 if tags == ALL else before - memory_of(node).mapped_bytes
            assert memory_of(node).mapped_bytes < before and left < before
    assert [memory_of(node).mapped_bytes for node in rig.nodes] == whole
    assert [node.engine.pool.base_address for node in rig.nodes] == addresses


def test_peers_are_unpaired_before_the_release_and_paired_after_it(rig, log):
    (producer,), (consumer,) = rig.prefill, rig.decode
    ask(rig)
    for node, gone, back in (
        (producer, {"stop serving"}, {"serve"}),
        (consumer, {"stop serving", "disconnect"}, {"serve", "connect"}),
    ):
        rig.until_free()
        log.clear()
        released(rig, node, tags=("kv_cache",))
        first = log.index("unmap")
        assert gone <= set(log[:first]) and not gone & set(log[first:])
        for _ in range(20):
            rig.turn()
        assert not {"connect", "serve"} & set(log)
        log.clear()
        taken_again(rig, node, tags=("kv_cache",))
        rig.until_paired()
        assert log.index("allow") < min(log.index(each) for each in back)
        assert "connect" in log[log.index("serve") :]


def test_repeated_releases_and_allocations_are_no_errors(rig, log, greedy):
    released(rig)
    log.clear()
    released(rig)
    assert log == []
    taken_again(rig)
    log.clear()
    taken_again(rig)
    assert not {"map", "unmap", "serve"} & set(log)
    rig.until_paired()
    assert ask(rig).tokens == greedy("old", PROMPT, 8)


def test_a_node_without_free_memory_sleeps_until_there_is_some(rig, greedy):
    (node,) = rig.decode
    released(rig, node)
    memory_of(node).driver.total = 0
    for _ in range(2):
        error = call_node(rig, node, ResumeMemory(ALL)).error
        assert error.startswith("kv_cache: 0.0") and error.endswith("GiB are free")
        assert node.role.scheduler.paused and memory_of(node).mapped_bytes == 0
    memory_of(node).driver.total = 1 << 40
    taken_again(rig, node)
    rig.until_paired()
    assert ask(rig).tokens == greedy("old", PROMPT, 8)


def test_pages_that_another_node_reads_are_released_after_the_read(shelf, log, greedy):
    sharing = PrefixSharingConfig(enabled=True)
    with rig_of(shelf, log, prefill=2, prefix_sharing=sharing) as rig:
        lender, _ = rig.prefill
        rig.learn_what_computing_takes()
        assert rig.serve(prompt(100), 2, prefill=[0]).tokens
        rig.flush(rig.decode[0])
        rig.wires.hold_back(ReadsDone)
        hint = PrefixHint(lender.front.address, 96)
        asked = rig.ask([*prompt(100), *prompt(30, 7)], 5, prefill=[1], prefix_hints=[hint])
        rig.until(lambda: lender.pages("publication"), "it is lent")
        pause(rig, lender)
        answers, before = lender.router.answers, len(lender.router.answers)
        log.clear()
        rig.command(lender, ReleaseMemory(("kv_cache",)))
        assert computes_nothing(rig) and len(answers) == before
        assert lender.pages("publication") and not {"stop serving", "unmap"} & set(log)

        rig.wires.release()
        rig.until(lambda: len(answers) > before, "it is given back")
        assert not answers[-1].error and "unmap" in log
        rig.run(asked)
        assert asked.tokens == greedy("old", asked.prompt, 5)
        taken_again(rig, lender, tags=("kv_cache",))
        resumed(rig, lender)


def test_fetching_weights_requires_allocated_pages(rig):
    (node,) = rig.decode
    pause(rig, node)
    released(rig, node, tags=("kv_cache",))
    address = rig.prefill[0].front.address
    answer = call_node(rig, node, TakeWeights(bytes(16), address))
    assert answer.error.startswith("kv_cache: its memory is released")
    taken_again(rig, node)
    resumed(rig, node)


def test_a_node_without_its_memory_keeps_its_role(rig):
    (node,) = rig.decode
    for tag in ALL:
        released(rig, node, tags=(tag,))
        assert "memory is released" in call_node(rig, node, PrepareRole("prefill")).error
        taken_again(rig, node, tags=(tag,))
        assert not call_node(rig, node, PrepareRole("prefill")).error


def test_links_that_do_not_end_prevent_the_release(rig, log, greedy, monkeypatch):
    (node,) = rig.decode
    real, goes_on = LoopbackConnection.close, threading.Event()
    monkeypatch.setattr(sides, "_CLOSE_S", 0.1)

    def close(connection):
        assert goes_on.wait(60)
        real(connection)

    monkeypatch.setattr(LoopbackConnection, "close", close)
    log.clear()
    error = call_node(rig, node, ReleaseMemory(("kv_cache",))).error
    assert error == "kv_cache: links to other nodes have not ended within 0.1 s"
    assert "unmap" not in log and not node.role.scheduler.paused
    goes_on.set()
    rig.until_paired()
    assert ask(rig).tokens == greedy("old", PROMPT, 8)

"""The release of pages after other nodes have lost their access."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from common.errors import EngineFault, FailedPrecondition
from node.control.operations import MemoryCalls
from node.messages import ReleaseMemory


class Memory:
    """Memory that must be isolated. Each step ends when the test says so."""

    isolates = True

    def __init__(self) -> None:
        self.unused = True
        self.isolated: Future[None] = Future()
        self.log: list[str] = []

    def check(self, tags: tuple[str, ...]) -> None:
        """Accept all tags."""

    def isolate(self) -> Future[None]:
        self.log.append("isolate")
        return self.isolated

    def give_back(self, tag: str) -> Future[None]:
        assert self.unused
        self.log.append(f"give back {tag}")
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def role():
    scheduler = SimpleNamespace(paused=False, at_rest=True, clear_cache=lambda: None)
    return SimpleNamespace(busy=False, scheduler=scheduler, release_kv=lambda: True)


def turns(calls, role, count=3):
    return [answer for _ in range(count) for answer in calls.done(role)]


# Pages that another node has requested before it lost its access are allocated after that.
def test_pages_are_released_a_turn_after_others_lost_access_and_when_none_is_used(memory, role):
    calls = MemoryCalls(memory)
    calls.release(1, ReleaseMemory(("kv_cache",)), role)
    assert not turns(calls, role) and memory.log == ["isolate"]
    memory.isolated.set_result(None)
    assert not turns(calls, role, 1) and memory.log == ["isolate"]
    memory.unused = False  # as the role has handled the requests that came before
    assert not turns(calls, role) and memory.log == ["isolate"]
    memory.unused = True
    (answer,) = turns(calls, role)
    assert answer.number == 1 and not answer.error
    assert memory.log == ["isolate", "give back kv_cache"]
    assert calls.gauges() == {"away_kv_cache": 1.0, "away_weights": 0.0}


def test_weights_need_no_isolation(memory, role):
    calls = MemoryCalls(memory)
    calls.release(1, ReleaseMemory(("weights",)), role)
    assert len(turns(calls, role)) == 1 and memory.log == ["give back weights"]


def test_a_node_that_cannot_be_isolated_continues(memory, role):
    calls = MemoryCalls(memory)
    calls.release(1, ReleaseMemory(("kv_cache", "weights")), role)
    assert role.scheduler.paused
    memory.isolated.set_exception(FailedPrecondition("links have not ended"))
    (answer,) = turns(calls, role)
    assert answer.error == "kv_cache: links have not ended"
    assert memory.log == ["isolate"] and not role.scheduler.paused and not calls.why_paused


def test_a_lost_rank_ends_the_node(memory, role):
    calls = MemoryCalls(memory)
    calls.release(1, ReleaseMemory(("kv_cache",)), role)
    memory.isolated.set_exception(EngineFault("a rank has not replied"))
    with pytest.raises(EngineFault):
        turns(calls, role)

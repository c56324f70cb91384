"""The release of pages after other nodes have lost access to them."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from common.errors import EngineFault, FailedPrecondition, Overloaded, ServingError
from node.control.operations import MemoryCommands


class Memory:
    """Memory that must be isolated. Each step ends when the test says so."""

    isolates = True

    def __init__(self) -> None:
        self.unused = True
        self.isolated: Future[None] = Future()
        self.fault: ServingError | None = None
        self.log: list[str] = []

    def check(self, tags: tuple[str, ...]) -> None:
        """Accept all tags."""

    def isolate(self) -> Future[None]:
        self.log.append("isolate")
        return self.isolated

    def release(self, tag: str) -> Future[None]:
        assert self.unused
        self.log.append(f"release {tag}")
        done: Future[None] = Future()
        if self.fault is None:
            done.set_result(None)
        else:
            done.set_exception(self.fault)
        return done


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def role():
    scheduler = SimpleNamespace(paused=False, at_rest=True, clear_cache=lambda: None)
    return SimpleNamespace(busy=False, scheduler=scheduler, release_kv=lambda: True)


def turns(steps, count=3):
    """Return the responses of a command in some turns of the engine loop."""
    return [answer for answer in itertools.islice(steps, count) if answer is not None]


# Pages that another node has requested before it lost access are allocated after that.
def test_pages_are_released_one_turn_after_others_lost_access_and_when_unused(memory, role):
    gauges = {}
    steps = MemoryCommands(memory, gauges).release(("kv_cache",), role)
    assert not turns(steps) and memory.log == ["isolate"]
    memory.isolated.set_result(None)
    assert not turns(steps, 1) and memory.log == ["isolate"]
    memory.unused = False  # when the role has handled earlier requests
    assert not turns(steps) and memory.log == ["isolate"]
    memory.unused = True
    (answer,) = turns(steps)
    assert not answer.error and memory.log == ["isolate", "release kv_cache"]
    assert gauges == {"away_kv_cache": 1.0, "away_weights": 0.0}


def test_weights_need_no_isolation_and_no_other_release_runs_at_the_same_time(memory, role):
    commands = MemoryCommands(memory, {})
    memory.unused = False
    steps = commands.release(("weights",), role)
    assert not turns(steps)
    for other in (commands.release(("kv_cache",), role), commands.resume(("weights",), role)):
        with pytest.raises(FailedPrecondition, match="is being released"):
            turns(other)
    memory.unused = True
    assert len(turns(steps)) == 1 and memory.log == ["release weights"]
    assert commands.why_paused == "its memory is released: allocate it again first"


def test_a_node_that_cannot_be_isolated_continues(memory, role):
    commands = MemoryCommands(memory, {})
    steps = commands.release(("kv_cache", "weights"), role)
    assert not turns(steps, 1) and role.scheduler.paused
    memory.isolated.set_exception(FailedPrecondition("links have not ended"))
    with pytest.raises(FailedPrecondition, match=r"^kv_cache: links have not ended$"):
        turns(steps)
    assert memory.log == ["isolate"] and not role.scheduler.paused and not commands.why_paused


def test_a_node_whose_memory_could_not_be_released_continues(memory, role):
    commands = MemoryCommands(memory, {})
    memory.fault = Overloaded("the driver is out of memory")
    with pytest.raises(Overloaded, match="out of memory"):
        turns(commands.release(("weights",), role))
    assert not role.scheduler.paused and not commands.why_paused


def test_a_lost_rank_ends_the_node(memory, role):
    memory.isolated.set_exception(EngineFault("a rank has not replied"))
    with pytest.raises(EngineFault):
        turns(MemoryCommands(memory, {}).release(("kv_cache",), role))

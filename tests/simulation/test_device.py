"""The simulated device: its tokens prove that each page was the right one."""

import numpy as np
import pytest

from engine.batch.batch import ForwardMode, PageCopies, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.table import SlotTable
from simulation.cost import StepCost
from simulation.device.runner import SimDevice, SimRunner
from simulation.device.witness import expected_tokens
from tests.support.specs import make_request

PAGE = 16
PROMPT = [(7 * index) % 251 for index in range(50)]


class Rig:
    """One request on a device, with pages in no particular order."""

    def __init__(self) -> None:
        self.table = SlotTable(4, 256, PAGE)
        self.pool = np.full(32, 77, np.uint64)  # what earlier requests left there
        self.host = np.zeros(32, np.uint64)
        self.device = SimDevice(self.table, self.pool, self.host)
        self.pages = np.array([9, 4, 30, 11, 2, 17], np.int32)
        self.slot = self.table.acquire(make_request(PROMPT))
        assert self.slot is not None
        self.table.set_pages(self.slot, PageHolding(self.pages[None]))
        self.step = 0

    def batch(self, start: int, end: int, samples: bool, **copies: PageCopies) -> ScheduleBatch:
        self.step += 1
        columns = [np.array([value], np.int32) for value in (self.slot, start, end)]
        mode = ForwardMode.DECODE if end - start == 1 else ForwardMode.EXTEND
        return ScheduleBatch(self.step, mode, *columns, np.array([samples]), **copies)

    def compute(self, start: int, end: int, samples: bool = True, **copies: PageCopies) -> int:
        """Run one step. Returns its token."""
        batch = self.batch(start, end, samples, **copies)
        return int(self.device.compute(batch, self.device.rows_of(batch))[0])

    def prefill(self) -> int:
        """Compute the prompt in two chunks. Returns the first token."""
        assert self.compute(0, 32, samples=False) == -1
        return self.compute(32, len(PROMPT))

    def decode(self, count: int) -> list[int]:
        """Compute the next tokens, which the table does not know yet."""
        end = len(PROMPT)
        return [self.compute(end + index, end + index + 1) for index in range(count)]


def test_chunks_and_decode_steps_give_the_expected_tokens():
    rig = Rig()
    assert [rig.prefill(), *rig.decode(30)] == expected_tokens(PROMPT, 31, PAGE)


def test_a_response_continues_in_other_pages_after_a_swap():
    rig = Rig()
    first = rig.prefill()
    device, host = rig.pages[:4], np.arange(4, dtype=np.int32)
    other = np.array([20, 21, 22, 23], np.int32)
    rig.table.set_pages(rig.slot, PageHolding(np.concatenate([other, rig.pages[4:]])[None]))
    end = len(PROMPT)
    copies = {"swap_out": PageCopies(device, host), "swap_in": PageCopies(other, host)}
    second = rig.compute(end, end + 1, **copies)
    assert [first, second] == expected_tokens(PROMPT, 2, PAGE)


@pytest.mark.parametrize("fault", ["missing", "swapped", "another request's"])
def test_a_wrong_page_gives_wrong_tokens(fault):
    rig = Rig()
    right = [rig.prefill(), *rig.decode(10)]
    first, second = rig.pages[:2]
    match fault:
        case "missing":
            rig.pool[second] = 0
        case "swapped":
            rig.pool[[first, second]] = rig.pool[[second, first]]
        case _:
            rig.pool[second] += np.uint64(1)
    end = len(PROMPT) + 10
    wrong = [rig.compute(end + index, end + index + 1) for index in range(10)]
    assert right == expected_tokens(PROMPT, 11, PAGE)
    assert wrong != expected_tokens(PROMPT, 21, PAGE)[11:]


def test_a_late_node_catches_up_slowly_and_loses_what_is_beyond_a_second(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("simulation.device.runner.time.monotonic", lambda: clock[0])
    rig = Rig()
    runner = SimRunner(rig.device, StepCost.of("h100", "llama-3-8b"))
    rig.prefill()
    steps = [runner.launch(rig.batch(50 + index, 51 + index, samples=True)) for index in range(3)]
    seconds = steps[0].seconds
    assert [step.done_at for step in steps] == pytest.approx(
        [100.0 + (1 + index) * seconds for index in range(3)]
    )
    clock[0] = steps[0].done_at + 0.5  # the host was busy
    runner.reached(steps[0])
    assert runner.due(steps[1]) == pytest.approx(clock[0] + 0.96 * seconds)
    assert runner.gauges()["simulation_lag"] == pytest.approx(0.5)
    clock[0] = steps[1].done_at + 5.0
    runner.reached(steps[1])
    assert runner.launch(rig.batch(53, 54, samples=True)).done_at >= clock[0] - 1.0

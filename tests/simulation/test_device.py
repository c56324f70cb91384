"""The simulated device: its tokens prove that each page was the right one."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from common.page_tables import PageTables
from engine.batch.batch import TO_GUESS, ForwardMode, PageCopies, ScheduleBatch, StateCheckpoint
from engine.batch.holding import PageHolding
from engine.batch.table import SlotTable
from simulation.cost import StepCost
from simulation.device.runner import SimCopier, SimRunner
from simulation.device.sim_device import SimDevice
from simulation.device.witness import expected_tokens, is_accepted, mix
from simulation.virtual.loop import VirtualLoop
from tests.support.specs import make_request

PAGE = 16
TABLES = PageTables(PAGE)
WINDOW = 20
WINDOWED = PageTables(PAGE, (None, WINDOW))
RECURRENT = PageTables(PAGE, state_pages=3)
KINDS = (TABLES, WINDOWED, RECURRENT, PageTables(PAGE, (None, WINDOW, WINDOW), 2))
PROMPT = [(7 * index) % 251 for index in range(50)]


class Rig:
    """One request on a device, with pages in no particular order."""

    def __init__(self, tables: PageTables = TABLES, acceptance: float = 0.0) -> None:
        self.table = SlotTable(4, 256, PAGE, tables.windows, tables.state_pages)
        self.pool = np.full(64, 77, np.uint64)  # what earlier requests left there
        self.host = np.zeros(64, np.uint64)
        self.device = SimDevice(self.table, self.pool, self.host, acceptance)
        numbers = np.random.default_rng(1).permutation(64).astype(np.int32)
        self.pages, self.state, self.free = np.split(
            numbers, np.cumsum([6 * tables.num_tables, tables.state_pages])
        )
        self.pages = self.pages.reshape(tables.num_tables, 6)
        self.slot = self.table.acquire(make_request(PROMPT))
        assert self.slot is not None
        self.table.set_pages(self.slot, PageHolding(self.pages, self.state))
        self.step = 0

    def batch(self, start: int, end: int, samples: bool = True, **more: Any) -> ScheduleBatch:
        self.step += 1
        columns = [np.array([value], np.int32) for value in (self.slot, start, end)]
        mode = ForwardMode.DECODE if end - start == 1 else ForwardMode.EXTEND
        mode = more.pop("mode", mode)
        return ScheduleBatch(self.step, mode, *columns, np.array([samples]), **more)

    def compute(self, start: int, end: int, samples: bool = True, **more: Any) -> int:
        """Run one step. Returns its token."""
        batch = self.batch(start, end, samples, **more)
        return int(self.device.compute(batch, self.device.rows_of(batch)).tokens[0])

    def prefill(self) -> int:
        """Compute the prompt in two chunks. Returns the first token."""
        assert self.compute(0, 32, samples=False) == -1
        return self.compute(32, len(PROMPT))

    def decode(self, count: int, end: int = len(PROMPT)) -> list[int]:
        """Compute the next tokens, which the table does not know yet."""
        return [self.compute(end + index, end + index + 1) for index in range(count)]

    def launch(self, drafts: list[int], start: int, **more: Any) -> Any:
        """Launch a step with drafts after the newest token. Returns what computes it."""
        past = start + 1 + len(drafts)
        self.table.tokens[self.slot, start + 1 : past] = drafts
        batch = self.batch(start, past, mode=ForwardMode.VERIFY, **more)
        rows = self.device.rows_of(batch)
        return lambda: self.device.compute(batch, rows)


@pytest.mark.parametrize("tables", KINDS)
def test_chunks_and_decode_steps_give_the_expected_tokens(tables):
    rig = Rig(tables)
    assert [rig.prefill(), *rig.decode(30)] == expected_tokens(PROMPT, 31, tables)


def test_a_response_continues_in_other_pages_after_a_swap():
    rig = Rig()
    first = rig.prefill()
    pages = rig.pages[0]
    device, host = pages[:4], np.arange(4, dtype=np.int32)
    other = rig.free[:4]
    rig.table.set_pages(rig.slot, PageHolding(np.concatenate([other, pages[4:]])[None]))
    end = len(PROMPT)
    copies = {"swap_out": PageCopies(device, host), "swap_in": PageCopies(other, host)}
    second = rig.compute(end, end + 1, **copies)
    assert [first, second] == expected_tokens(PROMPT, 2, TABLES)


@pytest.mark.parametrize("fault", ["missing", "swapped", "another request's"])
def test_a_wrong_page_gives_wrong_tokens(fault):
    rig = Rig()
    right = [rig.prefill(), *rig.decode(10)]
    first, second = rig.pages[0, :2]
    match fault:
        case "missing":
            rig.pool[second] = 0
        case "swapped":
            rig.pool[[first, second]] = rig.pool[[second, first]]
        case _:
            rig.pool[second] += np.uint64(1)
    end = len(PROMPT) + 10
    wrong = [rig.compute(end + index, end + index + 1) for index in range(10)]
    assert right == expected_tokens(PROMPT, 11, TABLES)
    assert wrong != expected_tokens(PROMPT, 21, TABLES)[11:]


@pytest.mark.parametrize("page, is_seen", [(1, False), (2, True), (3, True)])
def test_only_pages_in_the_window_change_the_response(page, is_seen):
    rig = Rig(WINDOWED)
    begin = [rig.prefill(), *rig.decode(2)]
    rig.pool[rig.pages[1, page]] += np.uint64(1)
    rest = rig.decode(7, len(PROMPT) + 2)  # token 52 is the first one, and sees those from 33 on
    assert (begin + rest == expected_tokens(PROMPT, 10, WINDOWED)) is not is_seen


def test_a_response_continues_from_a_kept_state():
    rig = Rig(RECURRENT)
    kept = rig.free[:3]
    rig.compute(0, 48, samples=False, kept=(StateCheckpoint(0, 32, kept),))
    rig.pool[rig.state] = 5
    resumed = (StateCheckpoint(0, 0, kept),)
    found = [rig.compute(32, len(PROMPT), resumed=resumed), *rig.decode(9)]
    assert found == expected_tokens(PROMPT, 10, RECURRENT)


@pytest.mark.parametrize("fault", ["swapped", "stale"])
def test_a_wrong_state_gives_wrong_tokens(fault):
    rig = Rig(RECURRENT)
    rig.prefill()
    stale = rig.pool[rig.state]
    rig.decode(1)
    rig.pool[rig.state] = stale if fault == "stale" else rig.pool[rig.state[::-1]]
    wrong = rig.decode(9, len(PROMPT) + 1)
    assert wrong != expected_tokens(PROMPT, 11, RECURRENT)[2:]


@pytest.mark.parametrize("tables", KINDS)
def test_accepted_drafts_are_tokens_of_the_response_and_rejected_ones_change_nothing(tables):
    rig, right = Rig(tables), expected_tokens(PROMPT, 10, tables)
    assert rig.prefill() == right[0]
    end = len(PROMPT)
    verified = rig.launch([right[1], 0, right[3]], end)
    # As if all drafts were accepted. Only the device knows that the row starts two tokens earlier.
    again = rig.launch([0], end + 4, early=np.array([3], np.int32))
    runs = verified().runs
    assert runs.counts.tolist() == [2]
    assert runs.tokens[0, :2].tolist() == right[1:3]
    runs = again().runs
    assert runs.counts.tolist() == [2]
    assert runs.tokens[0].tolist() == right[3:5]
    assert rig.decode(3, end + 4) == right[5:8]


@pytest.mark.parametrize("acceptance, count", [(1.0, 4), (0.0, 1)])
def test_drafts_of_the_device_are_accepted_with_their_probability(acceptance, count):
    rig, right = Rig(acceptance=acceptance), expected_tokens(PROMPT, 5, TABLES)
    rig.prefill()
    result = rig.launch([TO_GUESS] * 3, len(PROMPT))()
    assert result.runs.counts.tolist() == [count]
    assert result.runs.tokens[0, :count].tolist() == right[1 : 1 + count]
    assert result.tokens.tolist() == [right[count]]


def test_the_share_of_accepted_drafts_is_the_probability():
    totals = mix(np.arange(10_000, dtype=np.uint64))
    assert np.mean(is_accepted(totals, 0.6)) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_to_host_memory_and_back_takes_its_time_and_tears_what_changes(clock, changed):
    cost = StepCost.of("h100", "llama-3-8b")
    pool, host = np.arange(8, dtype=np.uint64), np.zeros(8, np.uint64)
    copier = SimCopier(pool, host, cost, page_bytes=50_000_000)
    pages = np.array([3, 1], np.int32)

    async def copied() -> float:
        done = asyncio.Event()
        copier.notify = done.set
        begin = time.monotonic()
        copy = copier.save(PageCopies(pages, pages))
        assert not copy.done()
        pool[1] += np.uint64(changed)
        await done.wait()
        assert copy.done()
        return time.monotonic() - begin

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        assert runner.run(copied()) == pytest.approx(2e-3)
    assert host[3] == 3
    assert (host[1] in (1, 2)) is not changed


def test_a_late_node_catches_up_slowly_and_loses_what_is_beyond_a_second(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("simulation.device.runner.time.monotonic", lambda: clock[0])
    rig = Rig()
    runner = SimRunner(rig.device, StepCost.of("h100", "llama-3-8b"), page_bytes=1)
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

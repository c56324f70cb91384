"""Decode steps by graph: what a graph was captured over is all that its replay may depend on."""

import threading

import pytest
import torch

from common.engine.models import load
from common.engine.run.graphs import ladder
from common.requests.sampling import SamplingParams
from tests.support.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tests.support.steps import GREEDY, Steps

CPU = torch.device("cpu")
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=9999, seed=7, temperature=1.3, top_p=0.9),
    SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=9999, seed=1, temperature=0.0, repetition_penalty=1.5),
    SamplingParams(max_tokens=9999, seed=3, temperature=1.0, presence_penalty=2.0),
]


class Repeated:
    """A graph as a CPU has it: the work is done again, and its output copied to where it was."""

    def __init__(self, work, output, replays):
        self._work, self._output, self._replays = work, output, replays

    def replay(self):
        self._replays.append((len(self._output), threading.current_thread().name))
        self._output.copy_(self._work())


class RepeatRecorder:
    def __init__(self):
        self.replays = []

    def __call__(self, work):
        output = work().clone()
        return Repeated(work, output, self.replays), output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), CPU, torch.float32)


def prompt(length):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCABULARY_SIZE, (length,), generator=generator).tolist()


def generate(steps, num_requests, num_tokens):
    slots = []
    for number in range(num_requests):
        slots.append(steps.add(prompt(5 + 13 * number), PARAMS[number % len(PARAMS)]))
        steps.prefill(slots[-1], chunk=16)
        for _ in range(2):
            steps.decode(*slots)  # one row more each time: every padding there is
    for _ in range(num_tokens):
        steps.decode(*slots)
    steps.settle()
    return [steps.remove(slot) for slot in slots]


@pytest.mark.parametrize("overlap", [True, False])
def test_graphs_change_no_token(model, overlap):
    eager = Steps(model, num_slots=11, overlap=overlap)
    expected = generate(eager, 11, 8)
    eager.close()
    recorder = RepeatRecorder()
    steps = Steps(model, num_slots=11, overlap=overlap, recorder=recorder)
    assert steps.runner.graph_sizes == (11, 8, 4, 2, 1)
    for size in steps.runner.graph_sizes:
        steps.runner.capture(size)
    assert generate(steps, 11, 8) == expected
    steps.close()
    assert {rows for rows, _ in recorder.replays} == {1, 2, 4, 8, 11}
    assert {name for _, name in recorder.replays} == {"forward-stream"}


def test_a_model_that_cannot_be_captured_is_served_without_graphs(model, caplog):
    class Refuses(RepeatRecorder):
        def __call__(self, work):
            if self.refusing:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return super().__call__(work)

    eager = Steps(model, num_slots=4, overlap=False)
    expected = generate(eager, 4, 4)
    eager.close()
    recorder = Refuses()
    recorder.refusing = False
    steps = Steps(model, num_slots=4, overlap=False, recorder=recorder)
    for size in steps.runner.graph_sizes:
        steps.runner.capture(size)
        recorder.refusing = True
    assert generate(steps, 4, 4) == expected
    steps.close()
    assert recorder.replays == []
    assert len(caplog.records) == 1 and "not permitted" in caplog.text


def test_a_step_takes_the_smallest_graph_there_is_and_else_none(model):
    recorder = RepeatRecorder()
    steps = Steps(model, num_slots=5, overlap=False, recorder=recorder)
    slots = [steps.add(prompt(3)) for _ in range(5)]
    for slot in slots:
        steps.prefill(slot)
    steps.decode(*slots[:3])
    assert recorder.replays == []
    steps.runner.capture(4)
    steps.decode(*slots)
    assert recorder.replays == []
    steps.decode(*slots[:1])
    steps.decode(*slots[:4])
    assert [rows for rows, _ in recorder.replays] == [4, 4]
    steps.close()


def test_the_rehearsal_writes_no_page_and_leaves_no_trace(model):
    params = PARAMS[3]
    plain, rehearsed = Steps(model, num_slots=3), Steps(model, num_slots=3)
    rehearsed.runner.rehearse(70)
    assert (rehearsed.pool.tensor == 0xFF).all()  # as it was made
    answers = []
    for steps in (plain, rehearsed):
        slot = steps.add(prompt(9), params)
        steps.prefill(slot)
        for _ in range(6):
            steps.decode(slot)
        steps.settle()
        answers.append(steps.remove(slot))
        steps.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 100, 256, 1000, 4096])
def test_sizes_waste_little_and_end_at_the_largest_batch(max_rows):
    sizes = ladder(max_rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_rows
    assert len(sizes) < 60
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(8, rows + max(7, rows / 7))

"""Decode steps by graphs: a replay depends only on the memory of the capture."""

import pytest
import torch
from msgspec.structs import replace

from common.errors import EngineFault
from common.requests.sampling import SamplingParams
from engine.batch.graph_shapes import GraphShape, ladder
from engine.batch.images import VisibleEmbeddings
from engine.models import load
from engine.runner.host_waits import Uncapturable, check_capturable
from engine.runner.rehearsal import padding
from tests.support.engine.steps import GREEDY, Steps, prompt
from tests.support.hardware.tapes import RepeatRecorder
from tests.support.models.checkpoints import make_checkpoint

CPU = torch.device("cpu")
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=9999, seed=7, temperature=1.3, top_p=0.9),
    SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=9999, seed=1, temperature=0.0, repetition_penalty=1.5),
    SamplingParams(max_tokens=9999, seed=3, temperature=1.0, presence_penalty=2.0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), CPU, torch.float32)


def generate(steps, num_requests, num_tokens):
    """Serve requests with all kinds of sampling. Return their texts, and close the steps."""
    slots = []
    for number in range(num_requests):
        slots.append(steps.add(prompt(5 + 13 * number, number), PARAMS[number % len(PARAMS)]))
        steps.prefill(slots[-1], chunk=16)
        for _ in range(2):
            steps.decode(*slots)  # one row more each time, so every amount of padding
    for _ in range(num_tokens):
        steps.decode(*slots)
    steps.settle()
    texts = [steps.remove(slot) for slot in slots]
    steps.close()
    return texts


@pytest.mark.parametrize("overlap", [True, False])
def test_graphs_change_no_token(model, overlap):
    expected = generate(Steps(model, num_slots=11, overlap=overlap), 11, 8)
    recorder = RepeatRecorder()
    steps = Steps(model, num_slots=11, overlap=overlap, recorder=recorder)
    steps.capture_all()
    assert generate(steps, 11, 8) == expected
    assert {rows for rows, _ in recorder.replays} > {1, 2, 4, 8, 11}
    assert {name for _, name in recorder.replays} == {"forward-stream"}


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_chosen_by_graphs_unless_a_feature_changes_logits(model, overlap):
    """Greedy and sampled rows, in steps of all sizes, and in prompts beside them."""
    texts, recorder = [], RepeatRecorder()
    for recorded in (None, recorder):
        steps = Steps(model, num_slots=11, overlap=overlap, recorder=recorded)
        steps.capture_all()
        slots = [steps.add(prompt(5 + number, number), PARAMS[number % 3]) for number in range(11)]
        for number, slot in enumerate(slots, start=1):
            steps.prefill(slot)
            steps.decode(*slots[:number])
        steps.settle()
        assert len(recorder.choices) == len(recorder.replays)
        penalised = steps.remove(slots.pop())
        steps.settle()
        slots.append(steps.add(penalised, PARAMS[3]))
        steps.prefill(slots[-1])
        steps.decode(*slots)
        steps.settle()
        texts.append([steps.remove(slot) for slot in slots])
        steps.close()
    assert texts[0] == texts[1]
    assert len(recorder.replays) == 2 * 11 + 2 and len(recorder.choices) == 2 * 11
    assert {rows for rows, _ in recorder.choices} == {1, 2, 4, 8, 11}


def test_a_head_that_cannot_be_captured_is_launched_after_the_graph_of_layers(model, caplog):
    class WithoutChoice(RepeatRecorder):
        def __call__(self, work, *, apart=False):
            graph, output = super().__call__(work, apart=apart)
            if apart:
                raise Uncapturable(["aten.nonzero.default"])
            return graph, output

    texts, recorder = [], WithoutChoice()
    for recorded in (None, recorder):
        steps = Steps(model, num_slots=4, recorder=recorded)
        steps.capture_all()
        texts.append(generate(steps, 3, 4))
    assert texts[0] == texts[1] and recorder.replays and not recorder.choices
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "sampling runs without CUDA graphs" in caplog.text and "nonzero" in caplog.text


class Failing(RepeatRecorder):
    """Captures the first graphs, and then fails."""

    def __init__(self, error, num_captures=1):
        super().__init__()
        self._error, self._left = error, num_captures

    def __call__(self, work, *, apart=False):
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().__call__(work, apart=apart)


def test_a_model_that_cannot_be_captured_is_served_without_graphs(model, caplog):
    expected = generate(Steps(model, num_slots=4, overlap=False), 4, 4)
    recorder = Failing(Uncapturable(["aten.nonzero.default"]))
    steps = Steps(model, num_slots=4, overlap=False, recorder=recorder)
    steps.capture_all()
    assert generate(steps, 4, 4) == expected
    assert recorder.replays == []
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "decode=False" in caplog.records[0].message and "nonzero" in caplog.text


def test_a_failed_capture_is_an_error_that_names_the_flag(model):
    """The allocator of torch is not usable afterwards: the next empty_cache asserts, or the
    memory of the graph is lost."""
    error = RuntimeError("operation not permitted when stream is capturing\nmore")
    recorder = Failing(error, num_captures=2)  # of the layers, and of sampling
    steps = Steps(model, num_slots=4, overlap=False, recorder=recorder)
    steps.runner.capture(GraphShape(4, 4))
    with pytest.raises(EngineFault) as raised:
        steps.runner.capture(GraphShape(6, 2))
    steps.close()
    assert "6 tokens in 2 rows could not be captured (operation not permitted" in str(raised.value)
    assert str(raised.value).endswith("--no-engine.cuda-graphs") and "more" not in str(raised.value)


VALUES, MASK = torch.arange(6.0).view(2, 3), torch.tensor([True, False])
COUNTS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    "operation, name",
    [
        (lambda: VALUES.sum().item(), "_local_scalar_dense"),
        (lambda: 1 if MASK.any() else 2, "_local_scalar_dense"),
        (lambda: VALUES[MASK], "index.Tensor"),
        (lambda: VALUES.clone().index_put_((MASK,), VALUES[1]), "index_put_"),
        (lambda: MASK.nonzero(), "nonzero"),
        (lambda: torch.where(MASK), "nonzero"),
        (lambda: torch.unique(COUNTS), "_unique2"),
        (lambda: torch.bincount(COUNTS), "bincount"),
        (lambda: COUNTS.repeat_interleave(COUNTS), "repeat_interleave"),
        (lambda: VALUES.to("meta"), "_to_copy"),
        (lambda: torch.tensor([1.0]), "lift_fresh"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operations_that_wait_for_the_device_or_copy_are_found_before_a_capture(operation, name):
    """On a CPU, which stands in for the device."""
    with torch.inference_mode(), pytest.raises(Uncapturable, match=name):
        check_capturable(operation, CPU)


def test_operations_that_a_graph_supports_are_accepted():
    def work():
        chosen = VALUES[COUNTS - 1].masked_fill(VALUES > 2, 0.0)
        chosen.index_put_((MASK,), VALUES.new_zeros(()))
        return torch.where(chosen > 1, chosen, VALUES).half().cumsum(1).topk(2)

    with torch.inference_mode():
        check_capturable(work, CPU)
        check_capturable(lambda: VALUES.sum().item(), torch.device("meta"))


def test_a_step_uses_the_smallest_graph_that_fits_or_none(model):
    recorder = RepeatRecorder()
    steps = Steps(model, num_slots=5, overlap=False, recorder=recorder)
    slots = [steps.add(prompt(3)) for _ in range(5)]
    for slot in slots:
        steps.prefill(slot)
    steps.decode(*slots[:3])
    assert recorder.replays == []
    steps.runner.capture(GraphShape(4, 4))
    steps.decode(*slots)
    assert recorder.replays == []
    steps.decode(*slots[:1])
    steps.decode(*slots[:4])
    assert [rows for rows, _ in recorder.replays] == [4, 4]
    steps.close()


def test_a_chunk_of_one_token_with_an_embedding_has_no_graph(model):
    steps = Steps(model, num_slots=2, recorder=RepeatRecorder())
    steps.runner.capture(GraphShape(1, 1))
    rows, forwards = padding(GraphShape(1, 1), 1), steps.runner.forwards
    seen = (VisibleEmbeddings(torch.zeros(1, model.spec.hidden_size), 0),)
    kind = {"late": False, "adapted": False}
    assert forwards.graph_of(rows, **kind) == GraphShape(1, 1)
    assert forwards.graph_of(replace(rows, seen=seen), **kind) is None
    steps.close()


def test_the_warmup_writes_no_page_and_leaves_no_state(model):
    plain, rehearsed = Steps(model, num_slots=3), Steps(model, num_slots=3)
    rehearsed.runner.rehearse(70)
    assert (rehearsed.pool.tensor == 0xFF).all()  # unchanged
    answers = []
    for steps in (plain, rehearsed):
        answers.append(steps.generate([prompt(9)], 7, [PARAMS[3]]))
        steps.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 100, 256, 1000, 4096])
def test_graph_sizes_waste_little_and_end_at_the_largest_batch(max_rows):
    sizes = ladder(max_rows, 8)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_rows
    assert len(sizes) < 60
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(8, rows + max(7, rows / 7))

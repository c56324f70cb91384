"""The runner under overlap: tokens that the CPU does not know yet, changing tables, moving
pages."""

import threading
import weakref

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from common.errors import InvalidRequest
from common.requests.sampling import SamplingParams, check
from engine.batch import batch
from engine.batch.batch import NOT_SAMPLED, ForwardMode, LayerGroup, PageCopies, ScheduleBatch
from engine.models import Model, load
from engine.runner.runner import SplitRunner
from kernels.sampling import sample as sampling
from tests.support.engine.steps import GREEDY, Scripted, make_all, prompt
from tests.support.models.checkpoints import make_checkpoint

CPU = torch.device("cpu")
SHARP = SamplingParams(max_tokens=9999, seed=2**63 + 5, temperature=0.9)
PARAMS = [
    GREEDY,
    SHARP,
    SamplingParams(max_tokens=9999, seed=7, temperature=1.3, top_p=0.9),
    SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, min_p=0.01),
]
PENALISED = [
    SamplingParams(max_tokens=9999, seed=1, temperature=0.0, repetition_penalty=1.5),
    SamplingParams(max_tokens=9999, seed=2, temperature=0.0, frequency_penalty=0.2),
    SamplingParams(max_tokens=9999, seed=3, temperature=1.0, presence_penalty=2.0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), CPU, torch.float32)


@pytest.fixture
def make_steps(model):
    with make_all(model) as make:
        yield make


def generate(steps, prompts, params, num_tokens):
    return steps.generate(prompts, num_tokens, params, chunk=16)


def certain(*tokens):
    """Return logits that determine the token."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 8) * 100.0


@pytest.mark.parametrize("params", [PARAMS, [*PENALISED, GREEDY]], ids=["sampled", "penalised"])
def test_overlap_changes_no_token(make_steps, params):
    prompts = [prompt(length, length) for length in (1, 16, 33, 40)]
    with_overlap, without = (
        generate(make_steps(overlap=overlap), prompts, params, 14) for overlap in (True, False)
    )
    assert with_overlap == without
    assert [len(tokens) for tokens in without] == [14] * 4


def test_a_decode_step_is_launched_before_the_cpu_knows_its_input(make_steps):
    steps = make_steps()
    slot = steps.add(prompt(5))
    steps.prefill(slot)
    steps.decode(slot)
    # Two tokens are in flight or known, and the CPU has read only the first one.
    assert steps.table.length[slot] == 7 and steps.table.known[slot] == 6
    assert steps.in_flight is not None


def test_launch_does_not_wait_for_the_forward(make_steps):
    gate = threading.Event()

    def forward(inputs, future_tokens):
        assert gate.wait(30)
        return certain(3)

    steps = make_steps(model=Scripted(forward))
    slot = steps.add([1, 2])
    steps.prefill(slot)  # returns although the forward is blocked
    assert steps.table.known[slot] == 2
    gate.set()
    steps.settle()
    assert steps.remove(slot) == [1, 2, 3]


def test_a_launched_step_reads_no_data_that_changes_later(make_steps):
    gate, seen = threading.Event(), []

    def forward(inputs, future_tokens):
        assert gate.wait(30)
        seen.extend(getattr(inputs, name) for name in inputs.__slots__)
        return certain(3)

    steps = make_steps(model=Scripted(forward))
    slot = steps.add([1, 2, 3], PARAMS[3])
    steps.prefill(slot)
    table = steps.table
    changed = (table.tokens, table.page_table, table.known)
    kept = [column[slot].copy() for column in changed]
    for column in changed:
        column[slot] = 99
    arrays = (steps.in_flight.batch.slots, steps.in_flight.batch.starts, steps.in_flight.batch.ends)
    expected = [array.copy() for array in arrays]
    gate.set()
    steps.in_flight.result()
    assert not any((np.asarray(tensor) == 99).any() for tensor in seen)
    assert all(map(np.array_equal, arrays, expected))
    for column, value in zip(changed, kept, strict=True):
        column[slot] = value


def test_the_features_of_a_step_do_not_change_with_later_requests(make_steps):
    """Seen failing if the columns of a step are views of those by slot."""
    steps = make_steps(num_slots=1)
    slot = steps.add([1, 2, 3], PENALISED[2])
    steps.prefill(slot)
    asked = steps.features.build(steps.in_flight.batch).columns()
    before = [column.copy() for column in asked]
    assert len(asked) > 10
    steps.settle()
    steps.remove(slot)
    steps.add([5, 6], SamplingParams(max_tokens=9, seed=77, temperature=0.3, top_k=2, min_p=0.5))
    assert all(map(np.array_equal, asked, before))


def test_rows_that_do_not_sample_are_marked(make_steps):
    steps = make_steps(model=Scripted(lambda inputs, _: certain(*[5] * len(inputs.sampled))))
    slots = [steps.add([1, 2, 3]) for _ in range(3)]
    steps.launch([(slot, 0, 2) for slot in slots], samples=[False, True, False])
    assert steps.in_flight.result().tokens.tolist() == [batch.NOT_SAMPLED, 5, batch.NOT_SAMPLED]


EXTREMES = [
    ("temperature", (2.0**-149, 1e-30, 1e30, 3.4e38)),
    ("top_p", (2.0**-149, 1.0)),
    ("min_p", (0.0, 1.0)),
    ("frequency_penalty", (-2.0, 2.0)),
    ("presence_penalty", (-2.0, 2.0)),
    ("repetition_penalty", (2.0**-149, 1e-30, 1e-6, 1e6, 1e30, 3.4e38)),
]


def test_no_accepted_parameters_make_logits_that_are_not_finite(make_steps):
    """Seen failing if every repetition_penalty above 0 was accepted."""
    logits = torch.tensor([[-1e4, -7.0, 0.0, 1.0, 1e4, 3.0, 2.0, 1e-3]])
    steps = make_steps(model=Scripted(lambda inputs, _: logits.repeat(len(inputs.sampled), 1)))
    num_let_in = 0
    for name, values in EXTREMES:
        for value in values:
            for temperature in (0.0, 1.0):
                fields = {"max_tokens": 9, "seed": 1, "temperature": temperature, name: value}
                params = SamplingParams(**fields)
                try:
                    check(params)
                except InvalidRequest:
                    continue
                num_let_in += 1
                slot = steps.add([0, 1, 2, 3, 4], params)
                steps.prefill(slot)
                steps.decode(slot)
                steps.settle()
                assert min(steps.remove(slot)) >= 0, params
    assert num_let_in > len(EXTREMES)


def test_a_chunk_that_is_not_finite_is_reported_although_it_samples_nothing(make_steps):
    def forward(inputs, future_tokens):
        logits = certain(*[5] * len(inputs.sampled))
        logits[1] = torch.nan
        return logits

    steps = make_steps(model=Scripted(forward))
    slots = [steps.add([1, 2, 3], PENALISED[0]) for _ in range(3)]
    steps.launch([(slot, 0, 2) for slot in slots], samples=[False, False, True])
    expected = [batch.NOT_SAMPLED, batch.NOT_FINITE, 5]
    assert steps.in_flight.result().tokens.tolist() == expected


def test_a_request_without_finite_logits_affects_neither_its_next_step_nor_another(make_steps):
    inputs_seen = []

    def forward(inputs, future_tokens):
        inputs_seen.append(future_tokens.clone())
        logits = certain(*[4] * len(inputs.sampled))
        logits[0] = torch.nan
        return logits

    steps = make_steps(model=Scripted(forward))
    slots = [steps.add([1, 2], PENALISED[0]), steps.add([3, 4], PENALISED[0])]
    steps.launch([(slot, 0, 2) for slot in slots])
    steps.decode(*slots)
    steps.settle()
    assert batch.NOT_FINITE == sampling.NOT_FINITE
    assert steps.remove(slots[0]) == [1, 2, batch.NOT_FINITE, batch.NOT_FINITE]
    assert steps.remove(slots[1]) == [3, 4, 4, 4]
    assert all((tokens >= 0).all() for tokens in inputs_seen)


def test_an_error_of_the_forward_is_raised_where_its_result_is_read(make_steps):
    def forward(inputs, future_tokens):
        raise FloatingPointError("of the device")

    steps = make_steps(model=Scripted(forward))
    steps.prefill(steps.add([1]))
    with pytest.raises(FloatingPointError, match="of the device"):
        steps.in_flight.result()


def test_a_request_replayed_from_its_tokens_samples_alike(make_steps):
    for params in (SHARP, *PENALISED):
        steps = make_steps()
        start = prompt(20)
        whole = start + generate(steps, [start], [params], 12)[0]
        slot = steps.add(whole[:26], params, num_prompt=20)  # a replay: prompt and six tokens
        steps.prefill(slot)
        for _ in range(5):
            steps.decode(slot)
        steps.settle()
        assert steps.remove(slot) == whole


def test_penalties_follow_tokens_counted_by_hand(make_steps):
    """Constant logits and greedy sampling, so that only the history decides."""
    base = torch.tensor([[1.013, 0.927, 0.809, 0.751, 0.603, 0.517, 0.239, -0.107]])
    start = [0, 0, 3]

    def by_hand(params, num_tokens):
        output = []
        for _ in range(num_tokens):
            logits = base[0].tolist()
            for token in range(8):
                if token in start or token in output:
                    strength = params.repetition_penalty
                    logits[token] *= strength if logits[token] < 0 else 1 / strength
                logits[token] -= params.frequency_penalty * output.count(token)
                logits[token] -= params.presence_penalty * (token in output)
            output.append(max(range(8), key=lambda token: logits[token]))
        return output

    strengths = [(1.5, 0, 0), (1, 0.3, 0), (1, 0, 0.45), (1.1, 0.1, 0.2)]
    for repetition, frequency, presence in strengths:
        params = SamplingParams(
            max_tokens=999, seed=0, temperature=0.0, repetition_penalty=repetition,
            frequency_penalty=frequency, presence_penalty=presence,
        )  # fmt: skip
        for overlap in (True, False):
            steps = make_steps(
                model=Scripted(lambda inputs, _: base.repeat(len(inputs.sampled), 1)),
                overlap=overlap,
            )
            assert generate(steps, [start], [params], 20) == [by_hand(params, 20)]


def test_counts_of_a_slot_are_not_inherited_by_the_next_request(make_steps):
    """Seen failing if the counts are not set to zero: a request continued the counts of the
    previous one."""
    alone = [generate(make_steps(), [prompt(9, 1)], [own], 10)[0] for own in PENALISED]
    steps = make_steps(num_slots=1)
    for own, expected in zip(PENALISED, alone, strict=True):
        # the same length, so that positions coincide exactly
        generate(steps, [prompt(9, 2)], [own], 10)
        assert generate(steps, [prompt(9, 1)], [own], 10) == [expected]
        generate(steps, [prompt(9, 3)], [SHARP], 3)  # and one that is not penalised


def test_requests_with_penalties_that_come_and_go_do_not_affect_each_other(make_steps):
    """More requests with penalties than slots, beside others: rows of counts are reused."""
    own = [PENALISED[0]]
    alone = {seed: generate(make_steps(), [prompt(7, seed)], own, 9) for seed in range(6)}
    steps = make_steps(num_slots=3)
    for seed in range(6):
        plain = steps.add(prompt(3, 99), SHARP)
        steps.prefill(plain)
        assert generate(steps, [prompt(7, seed)], own, 9) == alone[seed]
        steps.remove(plain)
    together = generate(steps, [prompt(7, seed) for seed in range(3)], own * 3, 9)
    assert together == [alone[seed][0] for seed in range(3)]


@pytest.mark.parametrize("params", [GREEDY, SHARP, *PENALISED], ids=lambda p: f"seed {p.seed}")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_retracted_request_continues_as_if_it_had_stayed(make_steps, params, overlap):
    tokens = prompt(21)
    expected = tokens + generate(make_steps(overlap=overlap), [tokens], [params], 20)[0]
    steps = make_steps(overlap=overlap)
    other = steps.add(prompt(30, 1), PENALISED[1])
    slot = steps.add(tokens, params)
    for each in (other, slot):
        steps.prefill(each)
    for _ in range(8):
        steps.decode(other, slot)
    # Retract: its last token is still in flight. The step in flight writes its last KV, and the
    # next step's swap comes after it on the stream.
    pages = steps.table.pages_of(slot)
    host_pages = np.arange(len(pages), dtype=np.int32)[::-1].copy()
    length = int(steps.table.length[other])
    steps.launch([(other, length - 1, length)], swap_out=PageCopies(pages, host_pages))
    so_far = steps.remove(slot)
    # Its slot and pages go to a third request, which overwrites them.
    third = steps.add(prompt(21, 5), PENALISED[0])
    assert third == slot and steps.table.pages_of(third).tolist() == pages.tolist()
    steps.prefill(third)
    steps.decode(other, third)
    # It joins again in another slot with other pages. Its KV is restored with the step it joins.
    again = steps.add(so_far, params, num_prompt=len(tokens))
    assert again != slot
    back = PageCopies(steps.table.pages_of(again), host_pages)
    length = int(steps.table.length[again])
    steps.launch([(again, length - 1, length)], swap_in=back)
    while steps.table.length[again] < len(expected):
        steps.decode(other, third, again)
    steps.settle()
    assert steps.remove(again) == expected


def test_activations_are_freed_with_their_forward(model, make_steps):
    steps, begun = make_steps(), []

    def begin(*inputs):
        forward = model.begin(*inputs)
        begun.append(weakref.ref(forward))
        return forward

    runner = SplitRunner(steps.runner, steps.runner.forwards, begin)
    tokens = prompt(40)
    starts, ends = np.array([[0], [40]], np.int32)
    slots, samples = np.array([steps.add(tokens)], np.int32), np.ones(1, np.bool_)
    first = ScheduleBatch(
        1, ForwardMode.SPLIT, slots, starts, ends, samples, layers=LayerGroup(0, 1, 2)
    )
    assert len(runner.launch(first).result().tokens) == 0
    assert begun[0]() is not None
    dropped = replace(first, step=2, ends=starts, layers=LayerGroup(1, 1, 2))
    assert runner.launch(dropped).result().tokens.tolist() == [NOT_SAMPLED]
    assert begun[0]() is None

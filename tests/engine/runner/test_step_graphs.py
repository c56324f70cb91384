"""Graphs of steps of every kind: drafts, adapters, prompts. Replays repeat the kernels of a
capture on the same memory, so the host must not have decided anything from a step's data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.config import LoraConfig, SpeculativeConfig
from common.requests.sampling import SamplingParams
from engine.batch.batch import TO_GUESS
from engine.batch.graph_shapes import GraphShape
from engine.models import Model, load
from engine.runner.graphs import StepGraphs
from kernels import device
from tests.support.engine.steps import GREEDY, Steps, prompt
from tests.support.hardware.tapes import RepeatRecorder, Tape, TapeRecorder
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.drafters import make_draft, make_hybrid_mtp, make_mtp

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    not device.INTERPRETED, reason="kernels that Triton compiles cannot be replayed"
)
pytestmark = pytest.mark.slow
NUM_SLOTS = 3
# Decode steps, and ragged ones: for a prompt, for drafts, and for prompts beside decode rows.
SIZES = ((3, 3), (12, 2), (12, 4), (24, 7))


class Drafting:
    """Serves three requests in steps of all kinds, one at a time.

    Args:
        answers: texts of the requests with their responses, from which drafts are drawn. None: the
            device drafts.
        adapters: of the requests, by name.
        sampling: of the requests.
    """

    def __init__(
        self,
        steps: Steps,
        answers: list[list[int]] | None = None,
        adapters: tuple[str, str, str] = ("", "", ""),
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.steps = steps
        self.num_steps = 0
        self._answers = answers
        self._adapters = adapters
        self._sampling = sampling

    def run(self, rounds: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """Serve requests of 5, 9 and 20 tokens. Return their texts.

        Args:
            rounds: number of drafts of each row, by step. Rows with more drafts come first. After
                the first step, which has two rows, comes a step with a prompt.
        """
        before, *rounds = rounds
        steps = self.steps
        first, second, third = slots = [
            steps.add(prompt(length, length), self._sampling, adapter=adapter)
            for length, adapter in zip((5, 9, 20), self._adapters, strict=True)
        ]
        self._launch([(first, 0, 5)])
        self._launch([(second, 0, 9)])
        self._launch(self._rows(first, second))
        self._launch([(third, 0, 10), *self._rows(first)], [False, True])
        self._verify([first, second], before)
        self._launch([(third, 10, 20), *self._rows(first, second)], [True] * 3)
        for drafts in rounds:
            self._verify(slots[: len(drafts)], drafts)
        steps.settle()
        texts = [steps.table.tokens_of(slot).tolist() for slot in slots]
        steps.close()
        return texts

    def _rows(self, *slots: int) -> list[tuple[int, int, int]]:
        lengths = [int(self.steps.table.length[slot]) for slot in slots]
        return [(slot, end - 1, end) for slot, end in zip(slots, lengths, strict=True)]

    def _verify(self, slots: list[int], drafts: tuple[int, ...]) -> None:
        table, rows = self.steps.table, []
        for place, ((slot, start, end), count) in enumerate(
            zip(self._rows(*slots), drafts, strict=True)
        ):
            known = int(table.known[slot])
            if self._answers is None:
                table.tokens[slot, known : end + count] = TO_GUESS
            else:
                guessed = np.array(self._answers[place][known : end + count], np.int32)
                guessed[-1:] += self.num_steps % 2  # the last one is wrong in every other step
                table.tokens[slot, known : known + len(guessed)] = guessed
            rows.append((slot, start, end + count))
        self._launch(rows, verify=any(drafts))

    def _launch(
        self, rows: list[tuple[int, int, int]], samples: list[bool] | None = None, **how: bool
    ) -> None:
        self.num_steps += 1
        self.steps.launch(rows, samples=samples, **how)


def check_begun(texts: list[list[int]], whole: list[list[int]]) -> None:
    """Check that each text is the beginning of a whole one."""
    assert texts == [each[: len(text)] for text, each in zip(texts, whole, strict=True)]


def replayed(recorder: TapeRecorder) -> int:
    return sum(tape.num_replays for tape in recorder.tapes)


def captured(
    model: Model, recorder: RepeatRecorder | TapeRecorder, *further: GraphShape, **options: Any
) -> Steps:
    """Return steps with graphs of SIZES and of further shapes."""
    steps = Steps(model, recorder=recorder, **{"num_slots": NUM_SLOTS, **options})
    wanted = {*further, *(GraphShape(*size) for size in SIZES)}
    for shape in steps.runner.graph_shapes:
        if shape in wanted:
            steps.runner.capture(shape)
    assert (steps.pool.tensor == 0xFF).all()  # unchanged: padding writes no page
    return steps


ADAPTERS = ("b", "", "a")
DRAFTERS = ("mtp", "hybrid", "draft_model")
HYBRID = ["linear_attention", "full_attention"]  # one layer of each kind: interpreted ones are slow
NO_DRAFTS = ((0, 0), *((0, 0, 0),) * 16)
ROUNDS = ((2, 1), (2, 1, 0), (3, 0, 0), (0, 0, 0), (1, 1, 1), (0, 0, 0))


def made(root: Path, kind: str) -> tuple[Path, SpeculativeConfig]:
    """Return a model, and its kind of drafter."""
    match kind:
        case "dense":
            return make_checkpoint(root, num_hidden_layers=1), SpeculativeConfig()
        case "mtp":
            return make_mtp(make_checkpoint(root, "deepseek_v3")), SpeculativeConfig(method="mtp")
        case "hybrid":
            model = make_checkpoint(root, "qwen3_next", num_hidden_layers=2, layer_types=HYBRID)
            return make_hybrid_mtp(model), SpeculativeConfig(method="mtp")
        case _:
            directory = make_checkpoint(root / "model", num_hidden_layers=1)
            draft = make_draft(root / "draft", directory)
            return directory, SpeculativeConfig(method="draft_model", draft_model=str(draft))


def served(
    model: Model,
    kind: str,
    recorder: RepeatRecorder | TapeRecorder,
    alone: list[list[int]],
    *,
    overlap: bool,
    choose: bool = True,
) -> int:
    """Serve requests by graphs, and compare their texts with those of steps without drafts and
    graphs. Return the number of replays, beside those that choose tokens.

    Args:
        choose: graphs choose the tokens of steps with drafts. False: they are too small.
    """
    larger: list[GraphShape] = [GraphShape(12, 12)] if choose else []
    late = [GraphShape(12, 4, late=True)] if kind in DRAFTERS else []
    num_slots = 12 if choose else NUM_SLOTS
    steps = captured(model, recorder, *larger, *late, num_slots=num_slots, overlap=overlap)
    drafting = Drafting(steps, alone if kind == "dense" else None)
    texts = drafting.run(ROUNDS)
    check_begun(texts, alone)
    assert len(texts[0]) > 5 + 8
    drafts = [max(each) for each in ROUNDS if any(each)] if kind in DRAFTERS else []
    updated = len(drafts) if kind != "draft_model" else 0
    # One graph before the drafts, then one or two for each, and the updates after verification.
    return drafting.num_steps + len(drafts) + sum(drafts) * (2 if choose else 1) + updated


def alone_of(model: Model, **options: Any) -> list[list[int]]:
    return Drafting(Steps(model, num_slots=NUM_SLOTS, **options)).run(NO_DRAFTS)


@pytest.mark.parametrize("choose", [True, False])
@pytest.mark.parametrize(
    "kind, overlap",
    [
        *((kind, True) for kind in ("dense", *DRAFTERS)),
        ("mtp", False),
        *(
            pytest.param(k, False, marks=pytest.mark.long)
            for k in ("dense", "hybrid", "draft_model")
        ),
    ],
)
def test_every_step_has_a_graph_and_the_right_tokens(
    kind: str, overlap: bool, choose: bool, tmp_path: Path
) -> None:
    """Rows are followed by padding, drafts are accepted and rejected, and each step has other pages
    and lengths than the one of the capture."""
    directory, speculation = made(tmp_path, kind)
    model = load(directory, CPU, torch.float32, speculation=speculation)
    model.compute_in_one_way()  # as on a GPU, where no latents are expanded
    recorder = RepeatRecorder()
    alone = alone_of(model)
    expected = served(model, kind, recorder, alone, overlap=overlap, choose=choose)
    assert len(recorder.replays) == expected


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("kind", ["dense", "mtp"])
def test_graphs_sample_the_tokens_of_steps_with_drafts(
    kind: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random tokens depend on their places, which rejected drafts move. A step needs no tensors of
    its own on the device."""
    monkeypatch.delattr(StepGraphs, "upload")
    directory, speculation = made(tmp_path, kind)
    model = load(directory, CPU, torch.float32, speculation=speculation)
    model.compute_in_one_way()
    sampling = SamplingParams(max_tokens=9999, seed=5, temperature=1.0, top_k=50)
    alone = Drafting(Steps(model, num_slots=NUM_SLOTS), sampling=sampling).run(NO_DRAFTS)
    recorder = RepeatRecorder()
    steps = Steps(model, num_slots=12, recorder=recorder, overlap=overlap)
    steps.capture_all()
    drafting = Drafting(steps, alone if kind == "dense" else None, sampling=sampling)
    check_begun(drafting.run(ROUNDS), alone)
    if kind == "dense":
        assert len(recorder.replays) == len(recorder.choices) == drafting.num_steps


def test_recurrent_states_are_written_after_drafts_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These writes are graphs of their own."""
    monkeypatch.delattr(StepGraphs, "upload")
    model = load(
        make_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=2, layer_types=HYBRID),
        CPU,
        torch.float32,
    )
    alone, recorder = alone_of(model), RepeatRecorder()
    steps = Steps(model, num_slots=12, recorder=recorder, overlap=False)
    steps.capture_all()
    check_begun(Drafting(steps, alone).run(ROUNDS), alone)
    assert len(recorder.replays) == len(recorder.choices) + sum(map(any, ROUNDS))


# Quick, with all kernels of the dense model: the test of adapters below.
@interpreted
@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", *DRAFTERS])
def test_no_result_of_a_replay_depends_on_the_hosts_data_at_the_capture(
    kind: str, tmp_path: Path
) -> None:
    directory, speculation = made(tmp_path, kind)
    model = load(directory, CPU, torch.float32, speculation=speculation)
    alone, recorder = alone_of(model), TapeRecorder()
    with recorder.interpreting():
        expected = served(model, kind, recorder, alone, overlap=True)
    assert replayed(recorder) == expected


class PoolTape(Tape):
    """A tape whose memory belongs to a pool: a replay destroys the results of all other tapes of
    the pool, except those that it reads. So may a graph, depending on the order of captures.

    Attributes:
        pool: all tapes of the pool.
    """

    def __init__(self, pool: list["PoolTape"]) -> None:
        super().__init__()
        self.pool = pool
        self._results: dict[int, Tensor] = {}  # by storage
        self._inputs: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = storages((args, kwargs))
        self._inputs |= given.keys() - self._results.keys()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for storage, leaf in storages(result).items():
            if storage not in self._inputs and leaf.numel():
                self._results.setdefault(storage, leaf)
        return result

    def launch(self, launch: Callable[[], object]) -> None:
        for cell in getattr(launch, "__closure__", None) or ():
            self._inputs |= storages(cell.cell_contents).keys() - self._results.keys()
        super().launch(launch)

    def destroy(self, besides: set[int]) -> None:
        with torch.inference_mode():
            for storage, leaf in self._results.items():
                if storage not in besides:
                    torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage()).fill_(0xFF)

    def replay(self) -> None:
        for other in self.pool:
            if other is not self:
                other.destroy(self._inputs)
        super().replay()


def storages(values: Any) -> dict[int, Tensor]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return {leaf.untyped_storage()._cdata: leaf for leaf in leaves}


class PoolRecorder(TapeRecorder):
    """Records tapes whose memory is in two pools, as CudaRecorder does."""

    def __init__(self) -> None:
        super().__init__()
        self._pools: list[list[PoolTape]] = [[], []]

    def new_tape(self, *, apart: bool) -> Tape:
        tape = PoolTape(self._pools[apart])
        tape.pool.append(tape)
        return tape


# Seen failing with one pool for all graphs.
@interpreted
@pytest.mark.long
def test_graphs_of_a_pool_may_destroy_each_others_results(tmp_path: Path) -> None:
    """Except what the updates read. The graphs of the head are replayed before these."""
    directory, speculation = made(tmp_path, "hybrid")
    model = load(directory, CPU, torch.float32, speculation=speculation)
    alone, recorder = alone_of(model), PoolRecorder()
    with recorder.interpreting():
        expected = served(model, "hybrid", recorder, alone, overlap=True)
    assert replayed(recorder) == expected


def with_adapters(root: Path) -> tuple[Model, LoraConfig]:
    directory = make_checkpoint(root / "model", num_hidden_layers=1)
    reference = reference_model(directory)
    for seed, name in enumerate(("a", "b")):
        make_adapter(root / "shelf" / name, reference, seed=seed)
    lora = LoraConfig(adapter_dir=root / "shelf", preload=("a", "b"), max_loras=2)
    return load(directory, CPU, torch.float32), lora


def serve_adapters(
    model: Model, lora: LoraConfig, recorder: RepeatRecorder | TapeRecorder, alone: list[list[int]]
) -> int:
    """Serve requests with adapters by graphs, and compare their texts. Return the number of
    steps."""
    adapted = [GraphShape(*size, adapted=True) for size in SIZES]
    drafting = Drafting(captured(model, recorder, *adapted, lora=lora), alone, ADAPTERS)
    texts = drafting.run(((2, 1), (2, 1, 0), (0, 0, 0)))
    check_begun(texts, alone)
    return drafting.num_steps


def test_adapters_are_inputs_of_graphs(tmp_path: Path) -> None:
    """Steps have tokens of two adapters and of none, in other numbers than the capture."""
    model, lora = with_adapters(tmp_path)
    steps = Steps(model, num_slots=NUM_SLOTS, lora=lora)
    alone = Drafting(steps, adapters=ADAPTERS).run(NO_DRAFTS)
    plain = alone_of(model)
    assert [one == other for one, other in zip(alone, plain, strict=True)] == [False, True, False]
    recorder = RepeatRecorder()
    assert serve_adapters(model, lora, recorder, alone) == len(recorder.replays)


@pytest.mark.long
@interpreted
def test_no_result_with_adapters_depends_on_the_hosts_data_at_the_capture(tmp_path: Path) -> None:
    model, lora = with_adapters(tmp_path)
    steps = Steps(model, num_slots=NUM_SLOTS, lora=lora)
    alone, recorder = Drafting(steps, adapters=ADAPTERS).run(NO_DRAFTS), TapeRecorder()
    with recorder.interpreting():
        assert serve_adapters(model, lora, recorder, alone) == replayed(recorder)

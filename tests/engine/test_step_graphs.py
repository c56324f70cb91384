"""Graphs of steps of every kind: drafts, adapters, prompts. Replays repeat the kernels of a capture
on the same memory, so nothing that depends on a step's data may have been decided by the host."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import LoraConfig, SpeculativeConfig
from engine.batch.batch import TO_GUESS
from engine.batch.graph_shapes import GraphShape
from engine.models import Model, load
from kernels import device
from tests.support.adapters import make_adapter
from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.drafters import make_draft, make_hybrid_mtp, make_mtp
from tests.support.steps import Steps, prompt
from tests.support.tapes import TapeRecorder

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not device.INTERPRETED, reason="kernels that Triton compiles cannot be replayed"
    ),
]
NUM_SLOTS = 3
# Decode steps, and ragged ones: for a prompt, for drafts, and for prompts beside decode rows.
SIZES = ((3, 3), (12, 2), (12, 4), (24, 7))


class Drafting:
    """Serves three requests in steps of all kinds, one at a time.

    Args:
        answers: texts of the requests with their responses, from which drafts are drawn. None: the
            device draws drafts.
        adapters: of the requests, by name.
    """

    def __init__(
        self,
        steps: Steps,
        answers: list[list[int]] | None = None,
        adapters: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        self.steps = steps
        self.num_steps = 0
        self._answers = answers
        self._adapters = adapters

    def run(self, rounds: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        """Serve requests of 5, 9 and 20 tokens. Return their texts.

        Args:
            rounds: number of drafts of each row, by step. Rows with more drafts come first.
        """
        steps = self.steps
        first, second, third = slots = [
            steps.add(prompt(length, length), adapter=adapter)
            for length, adapter in zip((5, 9, 20), self._adapters, strict=True)
        ]
        self._launch([(first, 0, 5)])
        self._launch([(second, 0, 9)])
        self._launch(self._rows(first, second))
        self._launch([(third, 0, 10), *self._rows(first)], [False, True])
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


@pytest.fixture
def recorder() -> Iterator[TapeRecorder]:
    recorder = TapeRecorder()
    with recorder.interpreting():
        yield recorder


def replayed(recorder: TapeRecorder) -> int:
    return sum(tape.num_replays for tape in recorder.tapes)


def captured(model: Model, recorder: TapeRecorder, *further: GraphShape, **options):
    """Return steps with graphs of SIZES and of further shapes."""
    steps = Steps(model, num_slots=NUM_SLOTS, recorder=recorder, **options)
    wanted = {*further, *(GraphShape(*size) for size in SIZES)}
    for shape in steps.runner.graph_shapes:
        if shape in wanted:
            steps.runner.capture(shape)
    return steps


DRAFTERS = ("mtp", "hybrid", "draft_model")
ROUNDS = ((2, 1, 0), (3, 0, 0), (0, 0, 0), (1, 1, 1), (0, 0, 0))


def made(root: Path, kind: str) -> tuple[Path, SpeculativeConfig]:
    """Return a model, and how drafts are made."""
    match kind:
        case "dense":
            return make_checkpoint(root, num_hidden_layers=1), SpeculativeConfig()
        case "mtp":
            return make_mtp(make_checkpoint(root, "deepseek_v3")), SpeculativeConfig(method="mtp")
        case "hybrid":
            directory = make_hybrid_mtp(make_checkpoint(root, "qwen3_next"))
            return directory, SpeculativeConfig(method="mtp")
        case _:
            directory = make_checkpoint(root / "model", num_hidden_layers=1)
            draft = make_draft(root / "draft", directory)
            return directory, SpeculativeConfig(method="draft_model", draft_model=str(draft))


@pytest.mark.parametrize(
    "kind, overlap",
    [
        ("dense", True),
        pytest.param("dense", False, marks=pytest.mark.long),
        *(pytest.param(each, True, marks=pytest.mark.long) for each in DRAFTERS),
    ],
)
def test_every_step_is_replayed_and_has_its_tokens(
    kind: str,
    overlap: bool,
    tmp_path: Path,
    recorder: TapeRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are in the middle of padding, drafts are accepted and rejected, and each step has other
    pages and lengths than the one of the capture."""
    directory, speculation = made(tmp_path, kind)
    model = load(directory, CPU, torch.float32, speculation=speculation)
    with monkeypatch.context() as patch:
        patch.setattr(device, "uses_triton", lambda tensor: False)
        plain = Drafting(Steps(model, num_slots=NUM_SLOTS))
        alone = plain.run(((0, 0, 0),) * 16)
    late = [GraphShape(12, 4, late=True)] if kind in DRAFTERS else []
    steps = captured(model, recorder, *late, overlap=overlap)
    drafting = Drafting(steps, alone if kind == "dense" else None)
    texts = drafting.run(ROUNDS)
    for text, expected in zip(texts, alone, strict=True):
        assert text == expected[: len(text)]
    assert len(texts[0]) > 5 + 8
    num_drafts = sum(max(drafts) for drafts in ROUNDS) if kind in DRAFTERS else 0
    assert replayed(recorder) == drafting.num_steps + num_drafts


def test_adapters_are_inputs_of_graphs(
    tmp_path: Path, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have tokens of two adapters and of none, in other numbers than the capture."""
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    model = load(directory, CPU, torch.float32)
    reference = reference_model(directory)
    for seed, name in enumerate(("a", "b")):
        make_adapter(tmp_path / "shelf" / name, reference, seed=seed)
    lora = LoraConfig(adapter_dir=tmp_path / "shelf", preload=("a", "b"), max_loras=2)
    adapters = ("b", "", "a")
    with monkeypatch.context() as patch:
        patch.setattr(device, "uses_triton", lambda tensor: False)
        plain = Drafting(Steps(model, num_slots=NUM_SLOTS, lora=lora), adapters=adapters)
        alone = plain.run(((0, 0, 0),) * 8)
    without = Drafting(Steps(model, num_slots=NUM_SLOTS)).run(((0, 0, 0),) * 8)
    assert [one == other for one, other in zip(alone, without, strict=True)] == [False, True, False]
    adapted = [GraphShape(*size, adapted=True) for size in SIZES]
    steps = captured(model, recorder, *adapted, lora=lora)
    drafting = Drafting(steps, alone, adapters)
    texts = drafting.run(((2, 1, 0), (0, 0, 0)))
    for text, expected in zip(texts, alone, strict=True):
        assert text == expected[: len(text)]
    assert replayed(recorder) == drafting.num_steps

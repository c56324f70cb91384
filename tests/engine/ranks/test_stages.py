"""Two stages of a node: the order of work in the first one, and warmups."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.config import SpeculativeConfig
from engine.models import open_checkpoint
from engine.models.spec import LoadTarget
from engine.ranks import Share, Stage
from engine.runner.forwards import Forwards
from engine.runner.runner import ModelRunner
from engine.runner.staged import StagedForwards, launch_without_head, rehearse_stage
from tests.support.engine.steps import Steps, prompt
from tests.support.engine.thread_ranks import run_ranks
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.drafters import make_mtp


class Done:
    is_done = True

    def wait(self) -> None:
        pass


class Noting:
    """Forwards, a stage and followers that record their work, which is done at once."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._number = 0

    def begin(self, step: Any, sampling: Any) -> tuple[Done, Callable[..., Callable[[], None]]]:
        number = self._number = self._number + 1
        self.done.append(f"layers {number}")
        return Done(), lambda *inputs: lambda: self.done.append(f"sample {number}")

    def launch(self, step: Any, sampling: Any, output: Any) -> Done:
        self.done.append("copies")
        return Done()

    def enqueue(self, work: Callable[[], None]) -> Done:
        work()
        return Done()

    def send_held(self) -> None:
        self.done.append(f"send {self._number}")

    def on_early(self) -> None:
        self.done.append("early")


def launched(noting: Noting) -> Callable[..., Any]:
    staged = StagedForwards(noting, noting, noting.on_early)  # type: ignore[arg-type]

    def launch(*token_ids: int) -> Any:
        rows = SimpleNamespace(token_ids=torch.tensor(token_ids)) if token_ids else None
        step: Any = SimpleNamespace(rows=rows)
        sampling: Any = None
        return staged.launch(step, sampling, sampling)

    return launch


def test_a_step_is_sampled_between_computing_and_sending_the_next_one() -> None:
    noting = Noting()
    launch = launched(noting)
    first, second = launch(5, 6), launch(7)
    assert noting.done == ["layers 1", "send 1", "layers 2", "sample 1", "send 2"]
    assert first.is_done and not second.is_done
    first.wait()
    second.wait()  # no step follows it
    assert noting.done[5:] == ["early", "sample 2"]
    launch(8)
    assert noting.done[7:] == ["layers 3", "send 3"]


def test_a_step_is_sampled_before_one_whose_input_may_be_its_tokens() -> None:
    noting = Noting()
    launch = launched(noting)
    launch(5)
    launch(7, -1)
    assert noting.done == ["layers 1", "send 1", "sample 1", "layers 2", "send 2"]


def test_a_step_is_sampled_before_one_without_rows() -> None:
    noting = Noting()
    launch = launched(noting)
    launch(5)
    launch()
    assert noting.done == ["layers 1", "send 1", "sample 1", "copies"]


def test_both_stages_warm_up_together(tmp_path: Path) -> None:
    loadable = open_checkpoint(make_checkpoint(tmp_path))

    def rehearse(peers: Share) -> set[int]:
        stage = Stage(peers.rank, peers.group)
        share = Share(stage=stage)
        model = loadable.load(LoadTarget(torch.device("cpu"), torch.float32, share=share))
        steps, seen = Steps(model, share=share), set[int]()
        runner, forward = steps.runner, model.forward
        assert isinstance(runner.forwards, Forwards)

        def noted(batch: Any, *beside: Any) -> Any:
            seen.add(len(batch.token_ids))
            return forward(batch, *beside)

        model.forward = noted  # type: ignore[method-assign]
        rehearse_stage(runner.builder.rehearsals, 64, runner.forwards, stage)
        steps.close()
        return seen

    first, last = run_ranks(2, rehearse)
    assert first == last and max(first) == 64


class Headless:
    """The forwards of the last stage, whose samples are zeros."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def graph_of(self, rows: Any, **kind: bool) -> None:
        return None

    def launch(self, step: Any, sampling: Any, output: Any) -> Any:
        output.tokens = torch.zeros(len(step.rows.slots), dtype=torch.int32)
        return launch_without_head(self._forwards, step)


# Seen failing with the hidden states of the first stage instead of the embeddings.
def test_the_last_stage_keeps_the_same_data_for_drafts_as_one_rank(tmp_path: Path) -> None:
    directory = make_mtp(make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3))
    loadable = open_checkpoint(directory, "native", SpeculativeConfig(method="mtp"))

    def kept(share: Share) -> list[Tensor]:
        """Return the keys, values and vectors after two prompts, one of them in chunks."""
        model = loadable.load(LoadTarget(torch.device("cpu"), torch.float32, share=share))
        steps = Steps(model, share=share, overlap=False)
        forwards: Any = steps.runner.forwards
        if share.stage is not None:
            first = share.stage.is_first
            forwards = StagedForwards(forwards, share.stage) if first else Headless(forwards)
        steps.runner = ModelRunner(steps.runner.builder, forwards)
        steps.prefill(steps.add(prompt(70)), chunk=32)
        steps.prefill(steps.add(prompt(40, 1)))
        steps.close()
        draft = steps.pool.draft
        return [] if draft is None else [*draft.layers, draft.vectors]

    one = kept(Share())
    first, last = run_ranks(2, lambda peers: kept(Share(stage=Stage(peers.rank, peers.group))))
    assert not first and len(last) == len(one) > 1
    for staged, whole in zip(last, one, strict=True):
        assert whole.isfinite().any()
        torch.testing.assert_close(staged, whole, rtol=1e-4, atol=1e-5, equal_nan=True)

"""Two stages of a node: the order of work in the first one, and rehearsals."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine.models import open_checkpoint
from engine.ranks import Share, Stage
from engine.runner.forwards import Forwards
from engine.runner.staged import StagedForwards, StageRehearsal
from tests.support.checkpoints import make_checkpoint
from tests.support.steps import Steps
from tests.support.thread_ranks import run_ranks


class Done:
    is_done = True

    def wait(self) -> None:
        pass


class Noting:
    """Forwards, a stage and followers that note what they do. Work is done at once."""

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


def test_a_step_is_sampled_after_the_layers_of_the_next_one_and_before_that_is_sent() -> None:
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


def test_both_stages_rehearse_together(tmp_path: Path) -> None:
    servable = open_checkpoint(make_checkpoint(tmp_path))

    def rehearse(peers: Share) -> set[int]:
        stage = Stage(peers.rank, peers.group)
        share = Share(stage=stage)
        model = servable.load(torch.device("cpu"), torch.float32, "none", share)
        steps, seen = Steps(model, share=share), set[int]()
        runner, forward = steps.runner, model.forward
        assert isinstance(runner.forwards, Forwards)

        def noted(batch: Any, *beside: Any) -> Any:
            seen.add(len(batch.token_ids))
            return forward(batch, *beside)

        model.forward = noted  # type: ignore[method-assign]
        StageRehearsal(runner.builder, runner.forwards, stage).rehearse(64)
        steps.close()
        return seen

    first, last = run_ranks(2, rehearse)
    assert first == last and max(first) == 64

"""Measure the CPU time in which the engine thread launches a step, with a driver that launches
nothing.

    python -m tools.bench.launches [--steps 300]

Triton compiles the kernels for compute capability 9.0 and finds each of them as in service, and the
launch itself returns at once. So no GPU is needed, and the time of the real driver is missing. The
model is tiny, because the time does not depend on its size.

The first table has the launches of a layer by our own kernels: by bound launchers, and by Triton
alone. Only steps without a graph pay them.

The second table has the time of whole steps, whose graphs replay in no time: the host builds the
inputs, packs them, copies them in one piece, and copies the tokens back. The rows of "verify" steps
have drafts. Those of "early" steps also begin earlier if the step before rejected drafts. An MTP
layer draws its drafts on the device, and recurrent layers update states after verification. The
scheduler and the reading of results are not included. Nor are the calls of the real driver: graph
launches, two copies, two events, and pinned memory for the tokens.

The figures are minima, because other processes only add to them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import driver

from common.config import LoraConfig, SpeculativeConfig
from common.requests.sampling import SamplingParams
from engine.batch.batch import TO_GUESS, ForwardMode, ScheduleBatch
from engine.models import Model, load
from engine.models.linear import onednn
from engine.runner.runner import LaunchedStep
from engine.runner.stream import StreamEvent
from kernels import device
from kernels.bound import BoundKernel
from tests.support.engine.steps import GREEDY, Steps, prompt
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.drafters import make_mtp
from tools.bench.resources.compilation import AbsentDevice
from tools.bench.support import record

ARCH = 90
NUM_SLOTS = 64
DRAFTS = 3
PROMPT_TOKENS = 100
GOAL_US = 40  # for steps, outside of their graphs
SAMPLED = SamplingParams(max_tokens=9999, seed=1, temperature=0.8, top_p=0.9)


class LaunchesNothing(AbsentDevice):
    """A GPU whose driver accepts kernels and launches none."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None

    def load_binary(self, *args: Any) -> tuple[object, int, int, int, int]:
        return object(), 1, 32, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


class InlineStream:
    """A stream whose work runs in the calling thread, like launches to a GPU."""

    def __init__(self, device: torch.device) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> StreamEvent:
        work()
        return SimpleNamespace(is_done=True, wait=lambda: None)

    def close(self) -> None:
        pass


class LaunchTime:
    """Seconds and number of launches of Baton's kernels.

    Args:
        bound: use bound launchers. False: Triton's own.
    """

    def __init__(self, *, bound: bool) -> None:
        self.seconds, self.count = 0.0, 0
        self._bound = bound

    @contextmanager
    def measured(self) -> Iterator[None]:
        run = BoundKernel.run if self._bound else lambda each, *a, **k: each.kernel.run(*a, **k)

        def timed(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            launched = run(kernel, *args, **kwargs)
            self.seconds += time.perf_counter() - began
            self.count += 1
            return launched

        with mock.patch.object(BoundKernel, "run", timed):
            yield


def _uses_triton(tensor: Tensor) -> bool:
    return True


def _num_multiprocessors(of: torch.device) -> int:
    return 132


@contextmanager
def no_launches() -> Iterator[None]:
    with (
        mock.patch.object(onednn, "packs_bfloat16", return_value=False),
        # Functions, because a call of a Mock takes microseconds.
        mock.patch.object(device, "uses_triton", _uses_triton),
        mock.patch.object(device, "num_multiprocessors", _num_multiprocessors),
        mock.patch("engine.backend.open_stream", InlineStream),
    ):
        driver.set_active(LaunchesNothing(ARCH))
        try:
            yield
        finally:
            driver.set_active(None)


def silent(work: Callable[[], Tensor], *, apart: bool = False) -> tuple[Any, Tensor]:
    """Return a graph whose replay takes no time."""
    return SimpleNamespace(replay=lambda: None), work()


def rows_of(kind: str) -> Sequence[tuple[int, int]]:
    """Return the first token and the end of each row of a step."""
    match kind:
        case "decode" | "sampled" | "adapters":
            return [(200, 201)] * NUM_SLOTS
        case "verify" | "early":
            return [(200, 201 + DRAFTS)] * (NUM_SLOTS // (1 + DRAFTS))
        case _:
            return [(0, PROMPT_TOKENS)]


class Launcher:
    """Launches the same step repeatedly."""

    def __init__(self, model: Model, kind: str, lora: LoraConfig | None, *, graphs: bool) -> None:
        recorder = silent if graphs else None
        self._steps = steps = Steps(model, num_slots=NUM_SLOTS, recorder=recorder, lora=lora)
        self._rows = rows_of(kind)
        for number, (_, end) in enumerate(self._rows):
            adapter = f"adapter{number % 4}" if kind == "adapters" else ""
            steps.add(prompt(end), SAMPLED if kind == "sampled" else GREEDY, adapter=adapter)
        starts, ends = np.array(self._rows, np.int32).T
        verify, early = ForwardMode.VERIFY, None
        modes = {"verify": verify, "early": verify, "prompt": ForwardMode.EXTEND}
        if kind == "early":  # the step before had drafts, and its result is not known yet
            early = np.full(len(self._rows), DRAFTS, np.int32)
            steps.table.known[: len(self._rows)] = starts - early
        if model.drafter is not None:
            steps.table.tokens[:] = TO_GUESS
        self._batch = ScheduleBatch(
            step=1,
            mode=modes.get(kind, ForwardMode.DECODE),
            slots=np.arange(len(self._rows), dtype=np.int32),
            starts=starts.copy(),
            ends=ends.copy(),
            samples=np.ones(len(self._rows), np.bool_),
            early=early,
        )
        if graphs:
            for shape in steps.runner.graph_shapes:
                steps.runner.capture(shape)

    def launch(self) -> LaunchedStep:
        return self._steps.runner.launch(self._batch)

    def own_launches(self, repeats: int) -> tuple[float, float, float]:
        """Return the number of launches of Baton's kernels in one step, and their microseconds by
        bound launchers and by Triton's own."""
        self.launch()
        best, count = [float("inf")] * 2, 0
        for _ in range(repeats):
            for by_triton in (False, True):
                spent = LaunchTime(bound=not by_triton)
                with spent.measured():
                    self.launch()
                best[by_triton], count = min(best[by_triton], spent.seconds), spent.count
        return count, best[0] * 1e6, best[1] * 1e6

    def microseconds(self, repeats: int) -> float:
        """Return the minimum time of one launched step."""
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            self.launch()
            best = min(best, time.perf_counter() - began)
        return best * 1e6


def of_layers(root: Path, architecture: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of a layer in a step without a graph."""
    few, many = 2, 6
    models = {}
    for number in (few, many):
        directory = root / f"{architecture}-{number}"
        make_checkpoint(directory, architecture, num_hidden_layers=number)
        models[number] = load(directory, torch.device("cpu"), torch.bfloat16)
    for kind in ("decode", "verify", "prompt"):
        less, more = (
            Launcher(models[number], kind, None, graphs=False).own_launches(repeats)
            for number in (few, many)
        )
        launches, us, by_triton = (
            (larger - smaller) / (many - few) for smaller, larger in zip(less, more, strict=True)
        )
        yield {
            "architecture": architecture,
            "step": kind,
            "launches": launches,
            "us": us,
            "by_triton_us": by_triton,
        }


def outside(root: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of steps outside of their graphs."""
    directory, cpu = make_checkpoint(root / "model"), torch.device("cpu")
    for number in range(4):
        make_adapter(root / "shelf" / f"adapter{number}", reference_model(directory), seed=number)
    names = tuple(f"adapter{number}" for number in range(4))
    lora = LoraConfig(adapter_dir=root / "shelf", preload=names, max_loras=4)
    recurrent = make_checkpoint(root / "recurrent", "qwen3_next")
    with_layer = make_mtp(make_checkpoint(root / "mtp", "deepseek_v3"))
    mtp = SpeculativeConfig(method="mtp")
    verifying = ("verify", "early")
    for name, model, kinds in (
        (
            "dense",
            load(directory, cpu, torch.bfloat16),
            ("decode", "sampled", "adapters", "prompt", *verifying),
        ),
        ("recurrent layers", load(recurrent, cpu, torch.bfloat16), ("decode", *verifying)),
        ("MTP layer", load(with_layer, cpu, torch.bfloat16, speculation=mtp), verifying),
    ):
        for kind in kinds:
            launcher = Launcher(model, kind, lora if kind == "adapters" else None, graphs=True)
            us = launcher.microseconds(repeats)
            yield {"model": name, "step": kind, "us": us, "goal_us": GOAL_US}


def main() -> None:
    steps = record.parsed(
        "launches", __doc__, ("--steps", 300, "measured steps of each kind")
    ).steps
    with TemporaryDirectory() as name, no_launches(), torch.inference_mode():
        root = Path(name)
        layers = [row for each in ("qwen3", "qwen3_moe") for row in of_layers(root, each, steps)]
        record.show(layers)
        beside = [*outside(root, steps)]
        record.show(beside)
    record.emit("launches", {"steps": steps, "arch": ARCH}, [*layers, *beside])


if __name__ == "__main__":
    main()

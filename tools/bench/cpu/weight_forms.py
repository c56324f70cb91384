"""Step times of one model with bfloat16, int8 and int4 weights, which take turns in one process.

A value is the minimum CPU time of several calls, on one thread.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from common.config import Quantize
from engine.models import load
from engine.runner.cpu import use_cpu
from tests.support.steps import Steps, prompt

ROWS = (1, 8)
PROMPT = 256  # tokens of each row before a decode step, and of a measured prompt
_TRIES = 3
_SLOTS = ROWS[-1] + 1


def rounds(
    models: Mapping[str, tuple[Path, Quantize]], count: int
) -> Iterator[Mapping[tuple[str, str], float]]:
    """Yield the milliseconds of each step and model, by their names.

    Args:
        models: checkpoint and quantization by name.
    """
    use_cpu(1, "required")
    running = {name: _Running(*each) for name, each in models.items()}
    for _ in range(count):
        least: dict[tuple[str, str], float] = {}
        for _ in range(_TRIES):
            for name, model in running.items():
                for step, took_s in model.steps():
                    least[step, name] = min(least.get((step, name), float("inf")), 1e3 * took_s)
        yield least


class _Running:
    def __init__(self, checkpoint: Path, quantize: Quantize) -> None:
        model = load(checkpoint, torch.device("cpu"), torch.bfloat16, quantize)
        self._steps = Steps(model, overlap=False, num_slots=_SLOTS, context_length=2 * PROMPT)
        self._slots = [self._steps.add(prompt(PROMPT, seed)) for seed in range(ROWS[-1])]
        for slot in self._slots:
            self._steps.prefill(slot)

    def steps(self) -> Iterator[tuple[str, float]]:
        for rows in ROWS:
            start = time.process_time()
            self._steps.decode(*self._slots[:rows])
            yield f"decode step of {rows}", time.process_time() - start
        slot = self._steps.add(prompt(PROMPT, _SLOTS))
        start = time.process_time()
        self._steps.prefill(slot)
        yield f"prompt of {PROMPT}", time.process_time() - start
        self._steps.remove(slot)

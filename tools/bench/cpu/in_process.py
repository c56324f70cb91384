"""Operations and steps that the CPU benchmark times in its own process, on one thread.

delta nets: convolution, delta rule and gated norm of Qwen3-Next's layer in bfloat16, one after the
other, compiled and by torch's operations. weight forms: steps of one model with bfloat16, int8 and
int4 weights.

A value is the minimum CPU time of several calls. What is compared takes turns.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from common.config import Quantize
from engine.models import load
from engine.runner.cpu import use_cpu
from kernels.linear_attention.causal_conv import causal_conv, causal_conv_reference
from kernels.linear_attention.delta_rule import Gates, delta_rule, delta_rule_reference
from kernels.linear_attention.gated_norm import gated_rms_norm, gated_rms_norm_reference
from kernels.linear_attention.state_cells import CellView, StateRows
from tests.support.engine.steps import Steps, prompt

_TRIES = 3

KEY_HEADS, GROUP, SIZE, WIDTH = 16, 2, 128, 4
HEADS, CHANNELS = KEY_HEADS * GROUP, (2 + GROUP) * SIZE
DTYPE = torch.bfloat16
# Tokens of each row.
DELTA_NET_STEPS = {
    "decode step of 1 row": (1,),
    "decode step of 8 rows": (1,) * 8,
    "4 rows with 3 drafts": (4,) * 4,
    "prompt of 128": (128,),
    "prompt of 512": (512,),
    "prompt of 2048": (2048,),
}


def delta_net_speedups() -> Iterator[tuple[str, float]]:
    """Yield the name of each step, and the ratio of torch's time to the compiled one's."""
    use_cpu(1, "required")
    references = causal_conv_reference, delta_rule_reference, gated_rms_norm_reference
    for name, counts in DELTA_NET_STEPS.items():
        compiled = _layer(counts, causal_conv, delta_rule, gated_rms_norm)
        in_torch = _layer(counts, *references)
        least = [math.inf] * 2
        for _ in range(_TRIES + 1):
            for place, layer in enumerate((compiled, in_torch)):
                start = time.thread_time()
                layer()
                least[place] = min(least[place], time.thread_time() - start)
        yield name, least[1] / least[0]


def _layer(
    counts: Sequence[int],
    conv: Callable[..., Tensor],
    rule: Callable[..., Tensor],
    norm: Callable[..., Tensor],
) -> Callable[[], Tensor]:
    """Return a call of the operations for rows of `counts` tokens. Updates states."""
    num_tokens, num_rows = sum(counts), len(counts)
    projected = torch.randn(num_tokens, KEY_HEADS * CHANNELS).to(DTYPE)
    columns = torch.arange(KEY_HEADS * CHANNELS, dtype=torch.int32).view(KEY_HEADS, CHANNELS)
    weight = torch.randn(KEY_HEADS, CHANNELS, WIDTH).to(DTYPE)
    inputs = torch.randn(num_rows, KEY_HEADS, CHANNELS, WIDTH - 1).to(DTYPE)
    matrices = torch.randn(num_rows, HEADS, SIZE, SIZE)
    a, b = torch.randn(2, num_tokens, KEY_HEADS, GROUP).to(DTYPE)
    gates = Gates(a, b, torch.zeros(HEADS), torch.zeros(HEADS))
    z = torch.randn(num_tokens, KEY_HEADS, GROUP * SIZE).to(DTYPE)
    own = torch.arange(num_rows, dtype=torch.int32).unsqueeze(1)
    rows = StateRows(
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        own,
        own,
        torch.zeros(num_rows, dtype=torch.int32),
        torch.full_like(own, -1),
        num_rows if num_tokens == num_rows else 0,
    )

    def run() -> Tensor:
        x = conv(projected, columns, weight, CellView(inputs, 0, 0, 1, KEY_HEADS), rows)
        y = rule(x, gates, CellView(matrices, 0, 0, 1, HEADS), rows)
        return norm(y, z, torch.ones(SIZE, dtype=DTYPE), 1e-6)

    return run


_DECODE_ROWS = (1, 8)
_MOST_ROWS = _DECODE_ROWS[-1]
_PROMPT = 256  # tokens of each row before a decode step, and of a measured prompt


class WeightForms:
    """One model with weights in several forms.

    Args:
        models: checkpoint and quantization by name.
    """

    def __init__(self, models: Mapping[str, tuple[Path, Quantize]]) -> None:
        use_cpu(1, "required")
        self._running = {name: _running(*model) for name, model in models.items()}

    def least_ms(self) -> Iterator[tuple[tuple[str, str], float]]:
        """Yield the milliseconds of each step and form, by their names."""
        least: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)
        for _ in range(_TRIES):
            for form, (steps, slots) in self._running.items():
                for step, took_s in _timed(steps, slots):
                    least[step, form] = min(least[step, form], 1e3 * took_s)
        yield from least.items()


def _running(checkpoint: Path, quantize: Quantize) -> tuple[Steps, list[int]]:
    """Return a model, and the slots of rows whose prompts are computed."""
    model = load(checkpoint, torch.device("cpu"), torch.bfloat16, quantize)
    steps = Steps(model, overlap=False, num_slots=_MOST_ROWS + 1, context_length=2 * _PROMPT)
    slots = [steps.add(prompt(_PROMPT, seed)) for seed in range(_MOST_ROWS)]
    for slot in slots:
        steps.prefill(slot)
    return steps, slots


def _timed(steps: Steps, slots: Sequence[int]) -> Iterator[tuple[str, float]]:
    for rows in _DECODE_ROWS:
        start = time.process_time()
        steps.decode(*slots[:rows])
        yield f"decode step of {rows}", time.process_time() - start
    slot = steps.add(prompt(_PROMPT, _MOST_ROWS + 1))
    start = time.process_time()
    steps.prefill(slot)
    yield f"prompt of {_PROMPT}", time.process_time() - start
    steps.remove(slot)

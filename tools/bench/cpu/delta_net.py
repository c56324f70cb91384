"""Times of a delta net's operations without matrix products: compiled, compared with torch.

The layer is that of Qwen3-Next, in bfloat16.

Convolution, delta rule and gated norm run one after the other. Both implementations take turns in
one process, on one thread. A value is the minimum CPU time of several calls.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.runner.cpu import use_cpu
from kernels.linear_attention.causal_conv import causal_conv, causal_conv_reference
from kernels.linear_attention.delta_rule import Gates, delta_rule, delta_rule_reference
from kernels.linear_attention.gated_norm import gated_rms_norm, gated_rms_norm_reference
from kernels.linear_attention.state_cells import CellView, StateRows

KEY_HEADS, GROUP, SIZE, WIDTH = 16, 2, 128, 4
HEADS, CHANNELS = KEY_HEADS * GROUP, (2 + GROUP) * SIZE
DTYPE = torch.bfloat16
# Tokens of each row.
STEPS = {
    "decode step of 1 row": (1,),
    "decode step of 8 rows": (1,) * 8,
    "4 rows with 3 drafts": (4,) * 4,
    "prompt of 128": (128,),
    "prompt of 512": (512,),
    "prompt of 2048": (2048,),
}
_TRIES = 3


def speedups() -> Iterator[tuple[str, float]]:
    """Yield the name of each operation, and the ratio of torch's time to the compiled one's."""
    use_cpu(1, "required")
    for name, counts in STEPS.items():
        compiled = _layer(counts, causal_conv, delta_rule, gated_rms_norm)
        in_torch = _layer(
            counts, causal_conv_reference, delta_rule_reference, gated_rms_norm_reference
        )
        least = [float("inf")] * 2
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

"""Compare all forms of expert layers in CPU steps with transformers' own block.

    python -m tools.bench.experts [--threads 2] [--rows 1 8 64 256] [--rounds 5]

The model has 4 layers of 32 experts, 8 of them per token (hidden 1024, inner 384: 0.15 billion
parameters in all). Weights and router are random. transformers' block has the same weights in
bfloat16. All forms take turns within every round, and the best round counts. `of transformers` is
the speed relative to transformers. Run it on an idle machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.models.blocks.experts import Experts, ExpertsBlock
from engine.models.blocks.protocol import ModelStep
from engine.models.linear import Form, Matrix, StoredExpert
from engine.runner.cpu import use_cpu
from kernels.experts.routing import Routing
from tools.bench.products import forms
from tools.bench.support.record import emit, say, table

LAYERS, HIDDEN = 4, 1024
SPEC = Experts(count=32, intermediate_size=384, gate="silu", routing=Routing(8, normalise=True))
PEER = "transformers, bfloat16"
COLUMNS = {
    "rows": "{rows}",
    "form": "{form}",
    "ms": "{ms:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "of transformers": "{of_peer:.2f}",
}

Net = Callable[[Tensor], object]


def peers() -> list[Qwen3MoeSparseMoeBlock]:
    """Return the blocks of a whole model, because the model selects their implementation."""
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        moe_intermediate_size=SPEC.intermediate_size,
        num_experts=SPEC.count,
        num_experts_per_tok=SPEC.routing.k,
        norm_topk_prob=SPEC.routing.normalise,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        for parameter in block.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return blocks


def ours(block: Qwen3MoeSparseMoeBlock, form: Form) -> Net:
    """Return our layer with the same weights in `form`."""
    stacks = zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
    stored = (StoredExpert(Matrix(gate_up), Matrix(down)) for gate_up, down in stacks)
    experts = form.experts(stored, SPEC.count, SPEC.gate)
    net = ExpertsBlock(SPEC.routing, block.gate.weight.detach(), None, None, experts, None, None)
    return partial(net.forward, step=cast(ModelStep, None))  # expert layers do not use the step


def measure(rows: Sequence[int], rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    nets: dict[str, list[Net]] = {name: [] for name in (PEER, *forms())}
    for block in peers():
        nets[PEER].append(lambda x, block=block: block(x[None]))
        for name, form in forms().items():
            nets[name].append(ours(block, form))
    best = {(count, name): float("inf") for count in rows for name in nets}
    for turn in range(rounds + 1):
        for count in rows:
            x = torch.randn(count, HIDDEN, dtype=torch.bfloat16)
            for name, layers in nets.items():
                elapsed = _seconds(partial(_step, layers, x))
                if turn:  # the first warms up
                    best[count, name] = min(best[count, name], elapsed)
    return [
        {
            "rows": count,
            "form": name,
            "ms": seconds * 1e3,
            "tokens_per_s": count / seconds,
            "of_peer": best[count, PEER] / seconds,
        }
        for (count, name), seconds in best.items()
    ]


def _step(layers: Sequence[Net], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.experts", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    use_cpu(asked.threads, "auto")
    with torch.inference_mode():
        measured = measure(asked.rows, asked.rounds)
    say(f"{LAYERS} layers, {SPEC.count} experts, {SPEC.routing.k} of a token")
    table(measured, COLUMNS)
    emit("experts", vars(asked), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())

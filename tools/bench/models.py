"""Measure tokens/s of a model on a CPU in all backends, compared with transformers' own `generate`.

    python -m tools.bench.models                       # Qwen3 of 0.45 B, bfloat16: minutes
    python -m tools.bench.models --small               # for rehearsals
    python -m tools.bench.models --family llama gpt_oss  # the same sizes, other families
    python -m tools.bench.models --family all --layers 4
    python -m tools.bench.models --quantize int8

The same checkpoint runs in three ways: natively (`--model-backend native`), by transformers' class
with our attention (`transformers`, which does not support hybrids), and by `generate` with a cache
of its own and torch's attention. There is one runner without scheduler and node. It computes a
prompt in chunks, then one token after the other. The ways take turns, and the median of the rounds
is printed. The weights are random, so the text of the responses is not evaluated. The last line is
JSON.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.config import ModelBackend, Quantize
from engine.models import load
from engine.runner.cpu import use_cpu
from tests.support.checkpoints import (
    ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    HYBRID_ARCHITECTURES,
    LATENT_ARCHITECTURES,
    make_checkpoint,
)
from tests.support.steps import Steps
from tools.bench.support.models import sizes_of
from tools.bench.support.record import emit, say, table

CPU = torch.device("cpu")
PROMPT, ANSWER, CHUNK = 256, 24, 128
CONTEXT = 512
FAMILIES = (
    *ARCHITECTURES,
    "gemma3_text",
    *EXPERT_ARCHITECTURES,
    *LATENT_ARCHITECTURES,
    *HYBRID_ARCHITECTURES,
)
_COLUMNS = {
    "family": "{family}",
    "way": "{way}",
    "prompt tokens/s": "{prompt}",
    "tokens/s": "{answer}",
    "native: prompt x": "{native_prompt}",
    "x": "{native_answer}",
}
Round = Callable[[], tuple[float, float]]  # seconds of the prompt, and of the response


def ours(directory: Path, backend: ModelBackend, quantize: Quantize) -> Round:
    model = load(directory, CPU, torch.bfloat16, quantize, backend)

    def measure() -> tuple[float, float]:
        steps = Steps(model, overlap=False, num_slots=1, context_length=CONTEXT)
        slot = steps.add([7] * PROMPT)
        started = time.perf_counter()
        steps.prefill(slot, chunk=CHUNK)
        prompted = time.perf_counter()
        for _ in range(ANSWER):
            steps.decode(slot)
        ended = time.perf_counter()
        steps.close()
        return prompted - started, ended - prompted

    return measure


def theirs(directory: Path) -> Round:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.full((1, PROMPT), 7)

    def generated(num_tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started

    def measure() -> tuple[float, float]:
        prompted = generated(1)
        return prompted, generated(1 + ANSWER) - prompted

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=["qwen3"], choices=("all", *FAMILIES))
    parser.add_argument("--layers", type=int, help="instead of all 28")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    use_cpu(options.threads, "auto")
    families = FAMILIES if "all" in options.family else options.family
    rows = [row for family in families for row in rows_of(family, options)]
    table(rows, _COLUMNS)
    emit("models", vars(options), rows)


def rows_of(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way."""
    sizes = sizes_of(family, small=options.small)
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    say(f"{family} ...")
    with tempfile.TemporaryDirectory() as where:
        directory = make_checkpoint(Path(where), family, dtype=torch.bfloat16, **sizes)
        ways = {"native": ours(directory, "native", options.quantize)}
        if family not in HYBRID_ARCHITECTURES:
            ways["transformers"] = ours(directory, "transformers", options.quantize)
        ways["generate"] = theirs(directory)
        rates = measured(ways, options.rounds)
    fastest = rates["native"]
    return [
        {
            "family": family,
            "way": name,
            "prompt": round(prompt, 1),
            "answer": round(answer, 2),
            "native_prompt": round(fastest[0] / prompt, 2),
            "native_answer": round(fastest[1] / answer, 2),
        }
        for name, (prompt, answer) in rates.items()
    ]


def measured(ways: Mapping[str, Round], rounds: int) -> dict[str, tuple[float, float]]:
    """Return tokens/s of prompt and of response, after a warm-up round."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for counted in range(-1, rounds):
        for name, measure in ways.items():
            times = measure()
            if counted >= 0:
                seen[name].append(times)
    return {
        name: (
            PROMPT / statistics.median(prompt for prompt, _ in times),
            ANSWER / statistics.median(answer for _, answer in times),
        )
        for name, times in seen.items()
    }


if __name__ == "__main__":
    main()

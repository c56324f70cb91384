"""Measure the effect of speculative decoding on tokens/s, for repetitive and other responses.

    python -m tools.bench.speculation [--model hybrid] [--drafter eagle] [--batches 1,16]
    [--rounds 3]

The model costs as much as others of its size. It has attention alone (`dense`) or a state in three
layers of four (`hybrid`). Its next token is a fixed successor of the newest token, and sometimes
any other token of the same text. The temperature sets how often. A prompt is a text, twice, so a
response is a copy with changes: few (`copy`), many (`edits`), almost only changes (`none`).

Drafts are made by repetition, or by a head that nearly knows the model: its logits are those of the
model with a mean error of `--off`. An engine runs in this process on a CPU. The same requests run
without and with drafts, in turns, and the best round of each way counts. The share of equal
responses is printed too. Time is the CPU time of this process, whose engine has one thread, so that
other processes on the machine hardly count.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from common.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from common.request import RequestSpec
from common.requests.sampling import SamplingParams
from engine.batch.request import Request
from engine.build import Engine, build
from engine.speculative.speculator import Speculator
from tools.bench.support.in_process import decode
from tools.bench.support.models import HYBRID_115M, QWEN3_105M, kept
from tools.bench.support.record import emit, table

VOCABULARY: int = QWEN3_105M["vocab_size"]
PROMPT = 256
ROUND = 128  # tokens of a text, whose last one has the first for its successor
PLAIN = "plain"
LIKELY, ALIKE = 18.35, 10.0  # logits of the successor and of the same text; others have about 0
LOADS = {"copy": 1.0, "edits": 1.35, "none": 3.0}  # temperatures


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    sizes: dict[str, Any]
    num_pages: int


KINDS = {
    "dense": _Kind("successors-105m", QWEN3_105M, 1024),
    "hybrid": _Kind("successors-hybrid-115m", HYBRID_115M, 2048),
}


def _model(directory: Path, kind: _Kind) -> Path:
    model = kept(directory, kind.name, torch.bfloat16, kind.sizes)
    file = model / "model.safetensors"
    if not (model / "successors").exists():
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor.zero_()  # costs as much, and adds nothing
        newest, hidden = torch.arange(VOCABULARY), kind.sizes["hidden_size"]
        texts, own = torch.randn(VOCABULARY // ROUND, hidden), torch.randn(VOCABULARY, hidden)
        texts = texts.repeat_interleave(ROUND, dim=0)
        tensors["model.embed_tokens.weight"].copy_(own + texts)
        successors = newest // ROUND * ROUND + (newest + 1) % ROUND
        of_next = own * (LIKELY - ALIKE) + texts * ALIKE
        tensors["lm_head.weight"][successors] = (of_next * (2**0.5 / hidden)).bfloat16()
        save_file(tensors, file, {"format": "pt"})
        (model / "successors").touch()
    return model


def _head(directory: Path, model: Path, kind: _Kind, off: float) -> Path:
    """Make an EAGLE head that computes a token's vector from its embedding alone, as the model
    does, and adds the error of its logits."""
    head, heads = directory / f"eagle-{kind.name}-{off}", kind.sizes["num_attention_heads"]
    hidden, inner = kind.sizes["hidden_size"], 256
    head.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(0)
    norms = load_file(model / "model.safetensors")["lm_head.weight"].float().norm(dim=1)
    error = torch.randn(hidden, hidden, generator=random) * hidden**-0.5 * off / norms.mean()
    of_token = (torch.eye(hidden) + error) * 0.5**0.5  # embeddings are sums of two random vectors
    tensors = {
        "fc.weight": torch.cat((of_token, torch.zeros(hidden, hidden)), dim=1),
        "layers.0.self_attn.q_proj.weight": torch.zeros(hidden, hidden),
        "layers.0.self_attn.k_proj.weight": torch.zeros(hidden, hidden),
        "layers.0.self_attn.v_proj.weight": torch.zeros(hidden, hidden),
        "layers.0.self_attn.o_proj.weight": torch.zeros(hidden, hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        "layers.0.mlp.gate_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.up_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }
    bfloats = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(bfloats, head / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
    }
    (head / "config.json").write_text(json.dumps(config))
    return head


def _requests(batch: int, tokens: int, temperature: float) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for number in range(batch):
        first = rng.integers(VOCABULARY // ROUND) * ROUND
        text = first + (np.arange(PROMPT) + rng.integers(ROUND)) % ROUND
        yield Request.of(
            RequestSpec(
                token_ids=text.astype(np.int32).tobytes(),
                sampling=SamplingParams(
                    max_tokens=tokens, seed=number, temperature=temperature, ignore_eos=True
                ),
            ),
            key=number,
            deadline=time.monotonic() + 3600,
            arrived=time.monotonic(),
            origin=(1, number),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    engine: Engine
    config: EngineConfig
    speculation: SpeculationConfig


@dataclass(frozen=True, slots=True)
class _Measured:
    tokens_per_s: float
    tokens_per_step: float
    answers: dict[int, list[int]]
    accepted: int
    rejected: int


def _measure(way: _Way, requests: list[Request]) -> _Measured:
    """Measure from the moment all requests have their first token to the end of the last one."""
    speculator = Speculator.of(way.speculation, way.config.scheduler.num_slots)
    engine = replace(way.engine, speculator=speculator)
    scheduler = engine.scheduler(way.config, lambda *_: None)
    decoded = decode(engine.runner, scheduler, requests)
    counters = scheduler.counters()
    return _Measured(
        decoded.tokens / decoded.seconds,
        decoded.tokens / decoded.steps,
        decoded.answers,
        counters.get("draft_tokens/accepted", 0),
        counters.get("draft_tokens/rejected", 0),
    )


def _round(ways: dict[str, _Way], requests: list[Request]) -> dict[str, _Measured]:
    """Run the same requests by each way in turn."""
    return {
        name: _measure(way, [replace(request) for request in requests])
        for name, way in ways.items()
    }


def _same(one: _Measured, other: _Measured) -> float:
    """Return the share of responses that are the same, token for token."""
    pairs = [one.answers[key] == other.answers[key] for key in one.answers]
    return round(float(np.mean(pairs)), 3)


def _ways(arguments: argparse.Namespace) -> dict[str, _Way]:
    """Return the ways: without drafts, with an adaptive number of drafts, and with the maximum."""
    kind = KINDS[arguments.model]
    model = _model(arguments.models, kind)
    head = ""
    if arguments.drafter == "eagle":
        head = str(_head(arguments.models, model, kind, arguments.off))
    speculation = SpeculationConfig(
        drafter=arguments.drafter, draft_model=head, max_drafts=arguments.max_drafts
    )
    plain = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        dtype=arguments.dtype,
        cache=CacheConfig(num_pages=kind.num_pages, host_pages=0, prefix_cache=True),
        scheduler=SchedulerConfig(max_running=128),
    )
    drafting = plain.model_copy(update={"speculation": speculation})
    always = speculation.model_copy(update={"adaptive": False})
    without, engine = build(plain), build(drafting)
    return {
        PLAIN: _Way(without, plain, SpeculationConfig()),
        "adaptive": _Way(engine, drafting, speculation),
        "always": _Way(engine, drafting, always),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=KINDS, default="dense")
    parser.add_argument("--drafter", choices=("ngram", "eagle"), default="ngram")
    parser.add_argument("--off", type=float, default=1.0, help="logits of the head, for eagle")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-drafts", type=int, default=SpeculationConfig().max_drafts)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--models", type=Path, default=Path("var/bench"), help="where they are kept"
    )
    arguments = parser.parse_args()
    ways = _ways(arguments)
    rows: list[dict[str, Any]] = []
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for batch, load in itertools.product(batches, arguments.loads.split(",")):
        rounds = [
            _round(ways, list(_requests(batch, arguments.tokens, LOADS[load])))
            for _ in range(arguments.rounds)
        ]
        plain = max(one[PLAIN].tokens_per_s for one in rounds)
        for way in list(ways)[1:]:
            best = max((one[way] for one in rounds), key=lambda one: one.tokens_per_s)
            drafts = best.accepted + best.rejected
            rows.append(
                {
                    "batch": batch,
                    "load": load,
                    "way": way,
                    "plain_tokens_per_s": round(plain, 1),
                    "tokens_per_s": round(best.tokens_per_s, 1),
                    "ratio": round(best.tokens_per_s / plain, 2),
                    "drafts_per_token": round(drafts / (batch * arguments.tokens), 2),
                    "accepted": round(best.accepted / max(1, drafts), 2),
                    "tokens_per_step": round(best.tokens_per_step / batch, 2),
                    "same": min(_same(one[PLAIN], one[way]) for one in rounds),
                }
            )
    table(rows, {name: f"{{{name}}}" for name in rows[0]})
    emit("speculation", vars(arguments) | {"models": str(arguments.models)}, rows)


if __name__ == "__main__":
    main()

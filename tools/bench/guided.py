"""Measure drafts for responses under a grammar, or those of draft models: tokens of a step, and
tokens/s over those without.

    python -m tools.bench.guided [--draft-models] [--rounds 5] [--requests 12] [--streams 1]

Each load runs on systems that differ in their drafts only, as `baton up --prefill 0` starts them,
in turns and with the same requests. Responses must be the same, so weights are float32. A step of a
request streams one message, so the tokens of a message are those of a step. Loads: JSON and tool
calls of the demo model, and objects of a schema that random weights are forced into. With
`--draft-models`, the loads are free text, greedy and sampled in turns: the demo model drafts for
itself, and for a model that costs eight times as much and says the same, also with noise in its
weights.
"""

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from cli.demo import DIRECTORY
from protos.router_pb2 import GenerateRequest
from protos.sampling_pb2 import Guide, Sampling
from tools.bench.support.load import Answer, Client
from tools.bench.support.record import emit, say, table
from tools.bench.support.systems import as_up
from tools.demo import structured, tasks
from tools.demo.tokenizer import CALL, CALL_END

_NGRAM = ("--engine.speculative.method", "ngram")
_ALL = "--no-engine.speculative.adaptive"
_TENSORS = "model.safetensors"
DRAFTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "adaptive": _NGRAM,
    "all": (*_NGRAM, _ALL),
}
RANDOM_SIZES = {  # 100 million parameters
    "vocab_size": 800,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 13,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
        "available": {"type": "boolean"},
        "condition": {"enum": ["unused", "refurbished", "damaged"]},
        "dimensions": {
            "type": "object",
            "properties": {
                name: {"type": "integer", "maximum": 99} for name in ("width", "height")
            },
            "required": ["width", "height"],
        },
    },
    "required": ["identifier", "available", "condition", "dimensions"],
    "additionalProperties": False,
}
COLUMNS = {
    "load": "{load}",
    "streams": "{streams}",
    "drafts": "{drafts}",
    "tokens of a step": "{tokens_per_step:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "ratio": "{ratio:.2f}",
    "from": "{least:.2f}",
    "to": "{most:.2f}",
}


@dataclass(frozen=True)
class Load:
    """Requests for one model."""

    name: str
    model: Path
    requests: Sequence[GenerateRequest]
    drafts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DRAFTS)


@dataclass
class Measured:
    tokens_per_s: list[float] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)  # tokens of each message except the first
    responses: list[list[int]] = field(default_factory=list)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        loads = _drafted_loads if options.draft_models else _loads
        rows = [
            row
            for load in loads(Path(directory), options)
            for row in asyncio.run(_measured(load, options))
        ]
    table(rows, COLUMNS)
    emit("guided", vars(options), rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.guided", description=__doc__)
    parser.add_argument("--draft-models", action="store_true", help="measure draft models")
    parser.add_argument("--noise", type=float, default=0.3, help="of a draft model (0.3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="of each load in a round (12)")
    parser.add_argument("--streams", type=int, default=1, help="requests at a time (1)")
    return parser.parse_args()


def _loads(directory: Path, options: argparse.Namespace) -> Iterator[Load]:
    random, count = Random(3), options.requests
    sums = [(tasks.number(random), tasks.number(random)) for _ in range(count)]
    answer = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    guide = Guide(json_schema=json.dumps({**answer, "required": ["answer"]}))
    asked = [_greedy(structured.sum_as_json(a, b).prompt, guide) for a, b in sums]
    yield Load("demo model, JSON", DIRECTORY, asked)
    calls = [structured.sums(random) for _ in range(count)]
    guide = Guide(structural_tag=json.dumps(_call_form()))
    asked = [_greedy(structured.called("tools add", a, b).prompt, guide) for a, b in calls]
    yield Load("demo model, tool call", DIRECTORY, asked)
    model = _random_model(directory / "random")
    guide = Guide(json_schema=json.dumps(RECORD))
    sampling = [
        Sampling(max_tokens=200, temperature=1.0, seed=n, guide=guide) for n in range(count)
    ]
    asked = [GenerateRequest(text=f"record {n}", sampling=each) for n, each in enumerate(sampling)]
    yield Load("random weights, schema", model, asked)


def _drafted_loads(directory: Path, options: argparse.Namespace) -> Iterator[Load]:
    random = Random(3)
    asked = [
        GenerateRequest(
            text=structured.sum_as_json(tasks.number(random), tasks.number(random)).prompt,
            sampling=Sampling(max_tokens=100, temperature=n % 2, seed=n, ignore_eos=True),
        )
        for n in range(options.requests)
    ]
    deep = _deep_model(directory / "deep")
    noisy = _noisy_model(directory / "noisy", options.noise)
    yield Load("the model itself", DIRECTORY, asked, _draft_model(DIRECTORY))
    yield Load("1/8 of the model", deep, asked, _draft_model(DIRECTORY))
    yield Load("1/8 of the model, noisy", deep, asked, _draft_model(noisy))


def _draft_model(directory: Path) -> dict[str, tuple[str, ...]]:
    method = "--engine.speculative.method", "draft_model"
    adaptive = *method, "--engine.speculative.draft-model", str(directory)
    return {"none": (), "adaptive": adaptive, "all": (*adaptive, _ALL)}


def _deep_model(directory: Path) -> Path:
    """Write the demo model with seven layers that add nothing after each of its layers."""
    config = json.loads((DIRECTORY / "config.json").read_text())
    tensors, deep = load_file(DIRECTORY / _TENSORS), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(model\.layers\.)(\d+)(\..*)", name)
        for number in range(8 if found else 1):
            if found:
                name = f"{found[1]}{8 * int(found[2]) + number}{found[3]}"
            idle = number and name.endswith(("o_proj.weight", "down_proj.weight"))
            deep[name] = torch.zeros_like(tensor) if idle else tensor.clone()
    config["num_hidden_layers"] *= 8
    config["layer_types"] *= 8
    return _written(directory, config, deep)


def _noisy_model(directory: Path, noise: float) -> Path:
    """Write the demo model with noise in its matrices, in multiples of their standard deviation."""
    torch.manual_seed(0)
    config = json.loads((DIRECTORY / "config.json").read_text())
    tensors = {
        name: tensor + noise * tensor.std() * torch.randn_like(tensor)
        if tensor.dim() > 1
        else tensor
        for name, tensor in load_file(DIRECTORY / _TENSORS).items()
    }
    return _written(directory, config, tensors)


def _written(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(DIRECTORY, directory, ignore=lambda *_: [_TENSORS])
    save_file(tensors, directory / _TENSORS, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _random_model(directory: Path) -> Path:
    """Write a model with the demo model's vocabulary.

    Its distributions are nearly uniform, so that rounding decides no token.
    """
    torch.manual_seed(0)
    end = json.loads((DIRECTORY / "config.json").read_text())["eos_token_id"]
    Qwen3ForCausalLM(Qwen3Config(**RANDOM_SIZES, eos_token_id=end)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DIRECTORY / name, directory)
    return directory


def _greedy(prompt: str, guide: Guide) -> GenerateRequest:
    return GenerateRequest(
        text=prompt, sampling=Sampling(max_tokens=100, temperature=0.0, guide=guide)
    )


def _call_form() -> dict[str, Any]:
    integers = {name: {"type": "integer"} for name in ("a", "b")}
    arguments = {"type": "object", "properties": integers, "required": ["a", "b"]}
    call = {
        "type": "object",
        "properties": {"name": {"const": structured.TOOL}, "arguments": arguments},
        "required": ["name", "arguments"],
    }
    content = {"type": "json_schema", "json_schema": call}
    ends = {"begin": f"{CALL}\n", "end": f"\n{CALL_END}"}
    return {"type": "structural_tag", "format": {"type": "tag", "content": content, **ends}}


async def _measured(load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    say(f"{load.name} ...")
    found = {name: Measured() for name in load.drafts}
    async with contextlib.AsyncExitStack() as exits:
        targets = {}
        for name, flags in load.drafts.items():
            flags = ("--engine.dtype", "float32", *flags)
            system = await exits.enter_async_context(as_up("colocated", load.model, flags))
            targets[name] = system.target
        for target in targets.values():  # compiles the grammar, and warms up
            await _round(target, load.requests, options.streams, Measured())
        for turn in range(options.rounds):
            for name in [*load.drafts][:: 1 if turn % 2 else -1]:
                await _round(targets[name], load.requests, options.streams, found[name])
    plain = found["none"]
    rows = []
    for name, measured in found.items():
        if measured.responses != plain.responses:
            raise SystemExit(f"{load.name}: responses differ with drafts {name}")
        pairs = zip(measured.tokens_per_s, plain.tokens_per_s, strict=True)
        ratios = [one / other for one, other in pairs]
        rows.append(
            {
                "load": load.name,
                "streams": options.streams,
                "drafts": name,
                "tokens_per_step": statistics.mean(measured.messages),
                "tokens_per_s": statistics.median(measured.tokens_per_s),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


async def _round(
    target: str, requests: Sequence[GenerateRequest], streams: int, measured: Measured
) -> None:
    """Run all requests once, `streams` at a time."""
    waiting, answers = list(enumerate(requests)), dict[int, Answer]()
    async with Client(target) as client:

        async def stream() -> None:
            while waiting:
                number, request = waiting.pop(0)
                answers[number] = await client.generate(request)
                measured.messages += answers[number].chunk_tokens[1:]

        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        took_s = time.perf_counter() - began
    measured.responses = [answers[number].token_ids for number in range(len(requests))]
    measured.tokens_per_s.append(sum(map(len, measured.responses)) / took_s)


if __name__ == "__main__":
    main()

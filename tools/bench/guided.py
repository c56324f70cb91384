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
from tools.bench.support.record import emit, parsed, say, show
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
INTEGER = {"type": "integer"}
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


@dataclass(frozen=True)
class DraftedLoad:
    """Requests for one model, and the flags of the systems that receive them, by their drafts."""

    name: str
    model: Path
    requests: Sequence[GenerateRequest]
    drafts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DRAFTS)


@dataclass
class DraftedRounds:
    """The figures of one system: tokens/s by round, tokens of messages, and responses."""

    tokens_per_s: list[float] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)  # without the first of each response
    responses: list[list[int]] = field(default_factory=list)  # of the last round


def main() -> None:
    options = parsed(
        "guided",
        __doc__,
        ("--draft-models", False, "measure draft models"),
        ("--noise", 0.3, "noise of a draft model, in standard deviations of its weights"),
        ("--rounds", 5, "rounds"),
        ("--requests", 12, "requests of each load in a round"),
        ("--streams", 1, "requests at a time"),
    )
    with tempfile.TemporaryDirectory() as directory:
        loads = _drafted_loads if options.draft_models else _loads
        rows = [
            row
            for load in loads(Path(directory), options)
            for row in asyncio.run(_measured(load, options))
        ]
    show(rows)
    emit("guided", vars(options), rows)


def _loads(directory: Path, options: argparse.Namespace) -> Iterator[DraftedLoad]:
    answer = {"type": "object", "properties": {"answer": INTEGER}, "required": ["answer"]}
    guide = Guide(json_schema=json.dumps(answer))
    asked = [_guided(text, guide) for text in _sums(options.requests)]
    yield DraftedLoad("demo model, JSON", DIRECTORY, asked)
    random, guide = Random(4), Guide(structural_tag=json.dumps(_call_form()))
    calls = (structured.called("tools add", *structured.sums(random)) for _ in asked)
    asked = [_guided(call.prompt, guide) for call in calls]
    yield DraftedLoad("demo model, tool call", DIRECTORY, asked)
    guide, sampled = Guide(json_schema=json.dumps(RECORD)), {"max_tokens": 200, "temperature": 1.0}
    asked = [_guided(f"record {n}", guide, seed=n, **sampled) for n in range(options.requests)]
    yield DraftedLoad("random weights, schema", _random_model(directory / "random"), asked)


def _drafted_loads(directory: Path, options: argparse.Namespace) -> Iterator[DraftedLoad]:
    asked = [
        _guided(text, None, temperature=n % 2, seed=n, ignore_eos=True)
        for n, text in enumerate(_sums(options.requests))
    ]
    deep = _deep_model(directory / "deep")
    noisy = _noisy_model(directory / "noisy", options.noise)
    yield DraftedLoad("the model itself", DIRECTORY, asked, _draft_model(DIRECTORY))
    yield DraftedLoad("1/8 of the model", deep, asked, _draft_model(DIRECTORY))
    yield DraftedLoad("1/8 of the model, noisy", deep, asked, _draft_model(noisy))


def _sums(count: int) -> list[str]:
    random = Random(3)
    sums = ((tasks.number(random), tasks.number(random)) for _ in range(count))
    return [structured.sum_as_json(a, b).prompt for a, b in sums]


def _guided(text: str, guide: Guide | None, **sampling: Any) -> GenerateRequest:
    """Return a request, by default greedy and of 100 tokens."""
    sampled = {"max_tokens": 100, "temperature": 0.0, **sampling}
    return GenerateRequest(text=text, sampling=Sampling(guide=guide, **sampled))


def _draft_model(directory: Path) -> dict[str, tuple[str, ...]]:
    method = "--engine.speculative.method", "draft_model"
    adaptive = *method, "--engine.speculative.draft-model", str(directory)
    return {"none": (), "adaptive": adaptive, "all": (*adaptive, _ALL)}


def _deep_model(directory: Path) -> Path:
    """Write the demo model with seven layers that add nothing after each of its layers."""
    tensors, deep = load_file(DIRECTORY / _TENSORS), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(model\.layers\.)(\d+)(\..*)", name)
        for number in range(8 if found else 1):
            if found:
                name = f"{found[1]}{8 * int(found[2]) + number}{found[3]}"
            idle = number and name.endswith(("o_proj.weight", "down_proj.weight"))
            deep[name] = torch.zeros_like(tensor) if idle else tensor.clone()
    return _written(directory, deep, num_layers=8)


def _noisy_model(directory: Path, noise: float) -> Path:
    """Write the demo model with noise in its matrices, in multiples of their standard deviation."""
    torch.manual_seed(0)
    tensors = load_file(DIRECTORY / _TENSORS)
    for tensor in tensors.values():
        if tensor.dim() > 1:
            tensor += noise * tensor.std() * torch.randn_like(tensor)
    return _written(directory, tensors)


def _written(directory: Path, tensors: dict[str, torch.Tensor], num_layers: int = 1) -> Path:
    """Write the demo model with other tensors. `num_layers`: in place of each of its layers."""
    shutil.copytree(DIRECTORY, directory, ignore=lambda *_: [_TENSORS])
    save_file(tensors, directory / _TENSORS, {"format": "pt"})
    config = json.loads((DIRECTORY / "config.json").read_text())
    config["num_hidden_layers"] *= num_layers
    config["layer_types"] *= num_layers
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


def _call_form() -> dict[str, Any]:
    """Return the structural tag of a call of the tool with two integers."""
    arguments = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
    call = {
        "type": "object",
        "properties": {
            "name": {"const": structured.TOOL},
            "arguments": {**arguments, "required": ["a", "b"]},
        },
        "required": ["name", "arguments"],
    }
    content = {"type": "json_schema", "json_schema": call}
    tag = {"type": "tag", "begin": f"{CALL}\n", "content": content, "end": f"\n{CALL_END}"}
    return {"type": "structural_tag", "format": tag}


async def _measured(load: DraftedLoad, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the load on all systems in turns. Returns a row for each system."""
    say(f"{load.name} ...")
    found = {name: DraftedRounds() for name in load.drafts}
    async with contextlib.AsyncExitStack() as exits:
        clients = {}
        for name, flags in load.drafts.items():
            flags = ("--engine.dtype", "float32", *flags)
            system = await exits.enter_async_context(as_up("colocated", load.model, flags))
            clients[name] = await exits.enter_async_context(Client(system.target))
        for client in clients.values():  # compiles the grammar, and warms up
            await _round(client, load.requests, options.streams, DraftedRounds())
        for turn in range(options.rounds):
            for name in [*load.drafts][:: 1 if turn % 2 else -1]:
                await _round(clients[name], load.requests, options.streams, found[name])
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
    client: Client, requests: Sequence[GenerateRequest], streams: int, measured: DraftedRounds
) -> None:
    """Run all requests once, `streams` at a time."""
    limit = asyncio.Semaphore(streams)

    async def one(request: GenerateRequest) -> Answer:
        async with limit:
            return await client.generate(request)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests))
    took_s = time.perf_counter() - began
    measured.messages += [n for answer in answers for n in answer.chunk_tokens[1:]]
    measured.responses = [answer.token_ids for answer in answers]
    measured.tokens_per_s.append(sum(map(len, measured.responses)) / took_s)


if __name__ == "__main__":
    main()

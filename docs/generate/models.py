"""docs/models.md, from what `bench.architectures` has found. `python -m docs.generate.models`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "models.md"
FOUND = Path(__file__).parents[2] / "bench" / "architectures.jsonl"
_HEAD = """# Models

A model is computed in one of two ways. `baton check --model DIR` says which one it takes, and why;
a node's log says it too. `--model-backend` (`engine.model_backend`) asks for one.

| `--model-backend` | |
|---|---|
| `native` | by blocks of our own: fused products and kernels |
| `transformers` | by transformers' class for the model, unmodified, with our attention in it |
| `auto`, the default | natively where the family has blocks here, else by transformers |

What is around a model never sees which way it is computed: prefix caches, chunked and mixed
prefill, overlap, retraction, hand-off, penalties and sampling work alike. KV of two nodes that
compute in different ways differs by rounding, so `model_backend` is part of what nodes compare when
they pair, and a pair that differs in it is refused.

## Layers with a state

Qwen3-Next and Qwen3.5 (texts, with experts or without; of the model that sees images too, the part
for texts) are hybrids: three layers of four are gated delta nets, which keep a matrix per head and
the last inputs of a short convolution instead of keys and values. That state is as large after one
token as after many: 77 MB for Qwen3-Next 80B, as much as the KV of 3150 tokens.

- A state lies in pages of the same pool as KV, so there is no second pool to size. What a request
  takes is its tokens' pages and the same number of pages for its state. Pages of 64 tokens
  (`--engine.cache.page-size 64`) make a state 50 page numbers, not 197.
- It goes to the decode node with the last pages of a prompt, and into host memory and back with a
  request that is retracted.
- One can go on from a cached prefix only where its state is kept too. Whoever computes a prompt
  keeps it at the last page's edge from which the same prompt could go on, so that the next turn of
  a conversation goes on there; and, from the second prompt on that begins like another, where they
  part, so that the third has use for what they share. What is kept lies in pages of the pool, is
  evicted like them, those first that a longer prefix has left behind, and is given up where
  somebody may need the room. Answers leave no states.
- A decode node has use for a cached prefix without one: it asks for the pages that it lacks, and
  the state comes from the prefill node.
- They take [drafts](speculation.md#states): a state only ever takes in what stands.
- On a GPU, a prompt's tokens pass through the delta rule one after the other, in registers: its
  bits do not depend on how the prompt is cut. Nobody has run it on one yet; its kernels are checked
  in Triton's interpreter and compiled for sm_80, sm_90a and sm_100 without spills.

What that is worth, by `python -m bench.hybrids`: 32 conversations of 6 turns with one of 6 system
prompts of 600 to 3000 tokens, the engine's own scheduler and cache, pages and states of the size of
Qwen3-Next's, and simulated time: 10 ms a forward, and 1/12 ms for each of its tokens. From the
second turn on, but for the last two columns:

| states | found in the cache | TTFT ms p50 | p90 | p99 | of first turns | computed |
|---|---|---|---|---|---|---|
| kept as above | 80 % | 64 | 164 | 259 | 46 | 139,546 |
| at the ends of chunks only, of 2048 tokens | 45 % | 168 | 315 | 464 | 124 | 318,106 |
| no prefix cache | 0 % | 391 | 813 | 1342 | 275 | 548,762 |
| none to keep: KV of all layers | 91 % | 38 | 49 | 76 | 41 | 79,258 |

The last row is what a hybrid could have at most. What it lacks are answers, of which no state is
kept: the next turn computes them anew.

## Images

Of Qwen2.5-VL images are served too, by its decoder's blocks and transformers' own encoder, in any
prompt: [Images](images.md).

## Layers with latents

DeepSeek-V2 and V3 (R1 and V3.1 too) keep one vector of a token and layer, 512 numbers of which each
head has its own key and value and 64 for the position: 70 kB of a token for V3 in 16 bits, where
its keys and values would be 71 times as many. The products that would make keys and values of it
are moved to the queries and to what comes out, in decode, and in prefill on a GPU. On a CPU a chunk
is attended to by keys and values, made for as long as a layer is computed, wherever that is less
work: always without a cached prefix, and then unless few tokens follow many.

- In pages, host memory, prefix caches and hand-offs latents are KV like any other. A node that
  keeps keys and values of such a model (`--model-backend transformers`) and one that keeps latents
  are not paired.
- Checkpoints in fp8 blocks, as DeepSeek publishes them, are read; `kv_b_proj` and what routers
  choose by stay floats in every form of weights. The layer that guesses tokens ahead is used if
  that is [asked for](speculation.md#layers).
- Query heads are divided among programs, 32 to each; chunks and decode rows are computed by the
  kernels that attend to keys and values, told that a value is a part of its key. They are checked
  in Triton's interpreter and compiled for sm_80, sm_90a and sm_100 without spills; nobody has run
  them on a GPU yet.

## By transformers

The class is loaded by `from_pretrained` from safetensors, onto the device, in the dtype that is
computed in. **Code that a checkpoint brings is never run**: `trust_remote_code` is off, and there
is no option for it. Before weights are read, the class is built without any, on torch's meta
device, and computes one token: its attention then tells heads and sizes of every layer, and the
rule of each mask is asked which keys a query sees. From that follows what a page holds.

- Served is what attends by transformers' attention interface, sees tokens before its own (all of
  them, or a window), and keeps nothing but K and V. K and V of different sizes, as of MLA, are
  padded to the larger one; layers that attend to another's KV store nothing.
- On a CPU the products of `nn.Linear` take the same forms as native ones
  ([On CPUs](cpu.md)): oneDNN's layout in bfloat16, and 8 bits with `--quantize int8`. Experts that
  a class keeps as one stack stay as they were loaded.
- Attention by chunks (Llama 4) is served within the first chunk, and rotations that depend on the
  longest text of a batch (`longrope`, `dynamic`) up to the length at which they begin to: the
  context is that much shorter, and `baton check` says so.
- [Quantised checkpoints](cpu.md#products) are read as they are for native models, and become floats
  while they are read: no kernel of a quantiser's runs, so they compute as fast as any other.
- Refused, with the reason in one line: encoders, encoder-decoders, classes that do not attend by
  the interface, recurrent states and convolutions, masks that depend on more than positions, heads
  of more than 256 numbers.
- On a GPU, nobody has run this way yet.

"""
_TABLE = """## Every class of transformers

`python -m bench.architectures` makes a tiny random checkpoint of each class under
`AutoModelForCausalLM`, has transformers save it, and sends prompts through a prefill node and a
decode node (two engines in one process, pages by loopback), from nothing and from what is cached.
With transformers {version}, in float32 on a CPU, **{served} of {all} classes give token for token
what their own full forward gives**. BERT's kin are asked as decoders (`is_decoder`).

| model_type | class | KV heads x size, tiny | tokens alike | native too |
|---|---|---|---|---|
"""
_REST = """
### Not served by transformers

| model_type | class | why |
|---|---|---|
"""


def page(found: Sequence[Mapping[str, Any]]) -> str:
    served = [one for one in found if one["asked"] and one["same"] == one["asked"]]
    others = [one for one in found if one not in served]
    version = max((one["transformers"] for one in found), default="")
    table = _TABLE.format(version=version, served=len(served), all=len(found))
    return "".join((_HEAD, table, *_rows(served), _REST, *_reasons(others), _END))


_END = """
This page is made by `python -m docs.generate.models` from `bench/architectures.jsonl`.
"""


def _rows(served: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in served:
        native = "yes" if one["native"] else ""
        yield (
            f"| {one['kind']} | {one['name']} | {one['keeps']} | "
            f"{one['same']} of {one['asked']} | {native} |\n"
        )


def _reasons(others: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in others:
        if one["native"]:
            yield f"| {one['kind']} | {one['name']} | natively: see above |\n"
            continue
        reason = one["reason"] or f"{one['same']} of {one['asked']} tokens are alike"
        yield f"| {one['kind']} | {one['name']} | {reason.replace('|', '/')} |\n"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FOUND.read_text().splitlines()]


if __name__ == "__main__":
    FILE.write_text(page(read()))

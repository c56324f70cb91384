"""Generate docs/models.md from the results of `docs.generate.architectures`.

`python -m docs.generate.models` writes the page.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "models.md"
FOUND = Path(__file__).with_name("architectures.jsonl")
_HEAD = """# Models

Baton serves models in two ways: with its own native blocks, or with the model class of
transformers. `baton check --model DIR` reports which one it uses and why, and so does the node's
log.

```sh
baton check --model DIR
baton up --model DIR --model-backend transformers
```

## Options

| `--model-backend` (`engine.model_backend`) | implementation |
|---|---|
| `auto` (default) | native blocks if the family has them, otherwise transformers |
| `native` | native blocks: fused products and kernels |
| `transformers` | transformers' unmodified class for the model, with Baton's attention |

All other parts work alike: prefix caches, chunked and mixed prefill, overlap, retraction, hand-off,
penalties and sampling. KV of the two implementations differs by rounding. Nodes therefore compare
`model_backend` when they pair, and reject a pair that differs.

<a id="layers-with-a-state"></a>

## Hybrid models with recurrent states

Qwen3-Next and Qwen3.5 are hybrids, with or without experts. Qwen3.5 also accepts
[images](images.md). Three of four layers are gated delta nets. They store a matrix per head and the
last inputs of a short convolution instead of keys and values. This state does not grow with the
context. It takes 77 MB for Qwen3-Next 80B, as much as the KV of 3150 tokens.

- States lie in pages of the same pool as KV, so there is no second pool to size. A request has
  pages for its tokens and the same number of pages for its state. With pages of 64 tokens
  (`--engine.cache.page-size 64`), a state needs 50 page numbers instead of 197.
- A state is sent to the decode node with the last pages of a prompt. It goes to host memory and
  back with a retracted request.
- Computation can continue from a cached prefix only where its state is cached too. The node keeps a
  state at the last page boundary of a prompt, so that the next turn of a conversation continues
  there. When a second prompt shares a prefix with an earlier one, it also keeps a state where they
  diverge. The third prompt can then use the common part.
- Kept states lie in pages of the pool and are evicted like them. States that a longer prefix has
  superseded go first. Responses leave no states.
- A decode node can use a cached prefix without a state. It reads the missing pages and the state
  from the prefill node.
- Hybrids support [speculative decoding](speculation.md#states): a state processes only accepted
  tokens.
- On a CPU, compiled operations process tokens one by one. So neither a prompt's chunks nor other
  requests change a bit of a state ([rule](cpu.md#states)). Hybrids support
  [batch invariance](batch-invariance.md).
- On a GPU, a prompt passes through the delta rule in chunks of 16 tokens. Where a prompt is cut, by
  the prefix cache or between steps, can change the last bits of a result. With
  `--engine.dtype float32`, and in rows of at most 16 tokens, tokens are computed one by one. Then
  the result does not depend on the cuts. The kernels are tested in Triton's interpreter and
  compiled for six architectures without spills ([estimate](gpu.md#estimates)). They have not run on
  a GPU yet.

[Benchmark: prefix cache of hybrid models](benchmarks/hybrid-models.md) has the gain.

## Images

Qwen2.5-VL, Qwen3-VL, Qwen3.5, LLaVA 1.5 and Gemma 3 accept images. Their decoders use native
blocks, and transformers' own image encoders: [Images](images.md).

<a id="layers-with-latents"></a>

## Latent attention (MLA)

DeepSeek-V2 and V3 (also R1 and V3.1) store one latent vector for each token and layer. It has 512
numbers, from which each head derives its own key and value, and 64 for the position. DeepSeek-V3
needs 70 kB a token in 16 bits. Its keys and values would need 71 times as much.

In decode, the products that derive keys and values are applied to the queries and to the output
instead. A chunk of a prompt uses keys and values that exist only while a layer is computed,
wherever that is less work. On a CPU this is always so without a cached prefix, and with one unless
few tokens follow many. A GPU also needs
[128 new tokens](gpu.md#derivation-of-expanded-keys-and-values).

- Latents are KV like any other in pages, host memory, prefix caches and hand-offs. A node that
  stores keys and values of such a model (`--model-backend transformers`) does not pair with a node
  that stores latents.
- Checkpoints in fp8 blocks, as DeepSeek publishes them, are supported. `kv_b_proj` and the
  parameters of the expert router stay floats in every weight format. The draft layer is used if [it
  is enabled](speculation.md#layers).
- Query heads are divided among thread blocks, 32 to each. Chunks and decode rows use the kernels
  for keys and values, with the value as a part of the key. The kernels are tested in Triton's
  interpreter and compiled for sm_80, sm_90a and sm_100 without spills. They have not run on a GPU
  yet.

<a id="by-transformers"></a>

## Models computed by transformers

`from_pretrained` loads the class from safetensors, onto the device, in the compute dtype. **Code
from a checkpoint never runs**: `trust_remote_code` is off, and there is no option for it.

Before the weights are read, the node builds the class without weights on torch's meta device and
computes one token. Its attention reports the heads and sizes of every layer, and each mask is
queried for the visible keys. This determines the content of a page.

- Supported classes use transformers' attention interface, attend to earlier tokens (all of them, or
  a window), and store only K and V. K and V of different sizes, as in MLA, are padded to the larger
  one. Layers that attend to another layer's KV store nothing.
- On a CPU, the products of `nn.Linear` use the native formats ([on CPUs](cpu.md)): oneDNN's layout
  in bfloat16, and 8 bits with `--quantize int8`. Experts that a class stores as one stack stay as
  they were loaded.
- The context of some models is shorter than in their configuration, and `baton check` reports it.
  With chunked attention (Llama 4) it ends with the first attention chunk. With rotations that
  depend on the longest text of a batch (`longrope`, `dynamic`) it ends at the length at which the
  rotation changes.
- [Quantised checkpoints](cpu.md#products) are read as for native models and become floats. No
  kernel of the quantiser runs, so they are as fast as others.
- Other classes are rejected with a reason in one line: encoders, encoder-decoders, recurrent
  states, convolutions, and classes that do not use the attention interface of transformers. Masks
  that depend on more than positions and heads of more than 256 numbers are rejected too.
- [Several ranks](parallel.md#models-computed-by-transformers) divide a class by its own plan for
  tensor parallelism.
- Most dense classes can be [batch-invariant](batch-invariance.md#models-computed-by-transformers).
- This implementation has not run on a GPU yet.

## See also

- [Speculative decoding](speculation.md)
- [On CPUs](cpu.md), [on a GPU](gpu.md)

"""
_TABLE = """## Every class of transformers

`python -m docs.generate.architectures` makes a tiny random checkpoint of each class under
`AutoModelForCausalLM` and saves it with transformers. It sends prompts through a prefill node and a
decode node: two engines in one process, with a loopback path. Prompts run with and without a cached
prefix. With transformers {version}, in float32 on a CPU, **{served} of {all} classes produce the
same tokens as their own full forward pass**. Models of the BERT family are tested as decoders
(`is_decoder`).

Then two [ranks](parallel.md) compute the same prompts. {divided} classes produce the same tokens.
transformers has no plan to split the layers of the others. Nodes with several ranks reject them.

| model_type | class | KV heads x size, tiny | identical tokens | 2 ranks | native too |
|---|---|---|---|---|---|
"""
_REST = """
### Not served by transformers

| model_type | class | reason |
|---|---|---|
"""


_PLAIN = str.maketrans("|;", "/,")  # in messages of other programs


def page(found: Sequence[Mapping[str, Any]]) -> str:
    served = [one for one in found if one["asked"] and one["same"] == one["asked"]]
    others = [one for one in found if one not in served]
    version = max((one["transformers"] for one in found), default="")
    divided = sum(not one["ranks"] for one in served)
    table = _TABLE.format(version=version, served=len(served), all=len(found), divided=divided)
    return "".join((_HEAD, table, *_rows(served), _REST, *_reasons(others), _END))


_END = """
This page is generated by `python -m docs.generate.models` from `docs/generate/architectures.jsonl`.
"""


def _rows(served: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in served:
        native, ranks = "yes" if one["native"] else "", "no plan" if one["ranks"] else "yes"
        yield (
            f"| {one['kind']} | {one['name']} | {one['keeps']} | "
            f"{one['same']} of {one['asked']} | {ranks} | {native} |\n"
        )


def _reasons(others: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in others:
        if one["native"]:
            yield f"| {one['kind']} | {one['name']} | computed natively, see above |\n"
            continue
        reason = one["reason"] or f"{one['same']} of {one['asked']} tokens are identical"
        yield f"| {one['kind']} | {one['name']} | {reason.translate(_PLAIN)} |\n"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FOUND.read_text().splitlines()]


if __name__ == "__main__":
    FILE.write_text(page(read()))

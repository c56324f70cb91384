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

Use this page to find out whether Baton supports a model, and with which limits. Baton has two
implementations of models:

- **Native**: Baton's own layers, with fused matrix products and kernels. Some features, such as
  [LoRA](lora.md), need this implementation.
- **transformers**: the unmodified model class of the transformers library, with Baton's attention.
  This implementation supports many more models.

`baton check --model DIR` and the log of a node report which implementation is used, and why.

```sh
baton check --model DIR
baton up --model DIR --model-backend transformers
```

## Options

| `--model-backend` (`engine.model_backend`) | implementation |
|---|---|
| `auto` (default) | native if the family is supported, otherwise transformers |
| `native` | native. Models of other families are rejected |
| `transformers` | transformers, also for native families |

The code outside the model is the same: prefix caches, chunked and mixed prefill, overlap,
retraction, hand-off, penalties and sampling. The KV of the two implementations differs by rounding.
A prefill node and a decode node therefore pair only if both use the same implementation.

## Native families

| family | `model_type` |
|---|---|
| Llama, and models with its architecture | `llama` |
| Mistral, Mixtral | `mistral`, `mixtral` |
| Qwen2, Qwen2.5 | `qwen2`, `qwen2_moe`, `qwen2_5_vl` (images) |
| Qwen3 | `qwen3`, `qwen3_moe`, `qwen3_vl` (images), `qwen3_vl_moe` (images) |
| Qwen3-Next ([hybrid](#hybrid-models-with-recurrent-states)) | `qwen3_next` |
| Qwen3.5 (hybrid) | `qwen3_5` (images), `qwen3_5_moe` (images) |
| Qwen3.5, text only (hybrid) | `qwen3_5_text`, `qwen3_5_moe_text` |
| DeepSeek-V2, V3, R1, V3.1 ([MLA](#latent-attention-mla)) | `deepseek_v2`, `deepseek_v3` |
| Gemma 2, Gemma 3 | `gemma2`, `gemma3` (images), `gemma3_text` |
| gpt-oss | `gpt_oss` |
| dots.llm1 | `dots1` |
| LLaVA 1.5 | `llava` (images) |

[Images and videos](images.md) describes the models with images. Their encoders are those of
transformers.

<a id="layers-with-a-state"></a>

## Hybrid models with recurrent states

In Qwen3-Next and Qwen3.5, three of four layers are gated delta nets. Delta nets keep a recurrent
state instead of keys and values: a matrix for each head, and the last inputs of a short
convolution. The state does not grow with the context. For Qwen3-Next 80B, the state of a request
takes 77 MB, as much as the KV of 3,150 tokens. [Benchmark: prefix cache of hybrid
models](benchmarks/hybrid-models.md) has measurements.

- **Memory.** States use pages of the same pool as KV, so you need not choose the size of a second
  pool. Each request has a fixed number of pages for its state. For Qwen3-Next 80B these are 197
  pages of 16 tokens (the default), or 50 pages with `--engine.cache.page-size 64`.
- **Hand-off and retraction.** The state moves to the decode node with the last pages of the prompt.
  It moves to host memory and back with a retracted request.
- **Prefix cache.** A request can reuse a prefix only up to a position whose state is cached (see
  *cached states* below).
- **Decode nodes** can use a cached prefix without a state, because they read the missing pages and
  the state from the prefill node.
- **[Speculative decoding](speculation.md#states)** is supported. States process only accepted
  tokens.
- **On a CPU**, compiled operations process tokens one by one. A state therefore has the same bits
  for any chunks and other requests ([rule](cpu.md#states)). [Batch invariance](batch-invariance.md)
  is supported.
- **On a GPU**, prompts are computed in groups of 16 tokens. The last bits of a result can therefore
  depend on the boundaries of chunks and of the cached prefix. With `--engine.dtype float32`, or
  with at most 16 tokens of a request in a step, tokens are computed one by one instead.

**Cached states.** A prefill node caches the state at the last page boundary of each prompt, so the
next turn of a conversation can continue there. If a second prompt shares a prefix with an earlier
one, the node also caches the state at the end of the shared prefix, and a third prompt can use this
state. No states of responses are cached. States are evicted like pages, first those for which a
longer prefix is cached.

The GPU kernels are tested in Triton's interpreter and compiled for six architectures without spills
([estimate](gpu.md#estimates)). The kernels have not run on a GPU yet.

<a id="layers-with-latents"></a>

## Latent attention (MLA)

DeepSeek-V2 and V3 (also R1 and V3.1) store one latent vector for each token and layer instead of
keys and values. This vector has 512 numbers, from which each head derives its own key and value,
and 64 numbers for the position. DeepSeek-V3 needs 70 kB per token in 16 bits. Stored keys and
values would need 71 times as much.

- **Decode.** Keys and values are not computed. The projections for them are applied to the queries
  and to the output instead.
- **Prefill.** Keys and values are computed from the latents, one layer at a time, where this is
  less work than attention over latents. On a CPU, it is less work unless a few new tokens follow a
  long cached prefix. A GPU does this only for at least [128 new
  tokens](gpu.md#derivation-of-expanded-keys-and-values).
- **Caches and hand-offs** treat latents like other KV. With `--model-backend transformers`, a node
  stores keys and values, so it does not pair with nodes that store latents.
- **Quantization.** DeepSeek's checkpoints in fp8 blocks are supported. `kv_b_proj` may be quantized
  in the checkpoint, but is converted to floats when it is loaded. The parameters of the expert
  router must be floats in the checkpoint.
- **Draft layer.** The draft layer of a checkpoint is used only by [speculative
  decoding](speculation.md#layers) with `mtp`.

The GPU kernels are tested in Triton's interpreter and compiled for sm_80, sm_90a and sm_100 without
spills. They have not run on a GPU yet.

<a id="by-transformers"></a>

## Models computed by transformers

Baton loads the model class with `from_pretrained` from safetensors, in the compute dtype. **Code
from a checkpoint never runs**: `trust_remote_code` is off, and no option enables it. This
implementation has not run on a GPU yet.

**Check at start.** Before it reads weights, the node builds the class on torch's meta device and
computes one token. From this it derives the heads and sizes of every layer, and the tokens to which
each layer attends. If Baton does not support a class, the error gives the reason in one line.

| supported | rejected |
|---|---|
| decoders that use transformers' attention interface | other classes, encoders, encoder-decoders |
| attention to all earlier tokens, or to a window | masks that depend on other data than positions |
| layers that store only keys and values | recurrent states, convolutions |
| layers that attend to the KV of another layer and store none | - |
| heads of at most 256 numbers | larger heads |

- **Padding.** Keys and values of different sizes, as in MLA, are padded to the larger size.
- **CPU speed.** Matrix products of `nn.Linear` use Baton's [formats for matrices](cpu.md#products).
  Experts that a class stores in one stacked tensor do not use these formats.
- **Shorter context.** For some models, Baton supports a shorter context than their configuration
  has. `baton check` reports the limit. With chunked attention (Llama 4), the context is one
  attention chunk. With RoPE scaling that depends on the longest text of a batch (`longrope`,
  `dynamic`), the context is the length at which the scaling changes.
- **[Quantized checkpoints](cpu.md#quantised-checkpoints)** are supported as for native models.
  Their weights are converted to floats, so they are not faster than unquantized checkpoints.
- **[Several ranks](parallel.md#models-computed-by-transformers)** divide a model by the plan for
  tensor parallelism that its class contains.
- **[Batch invariance](batch-invariance.md#models-computed-by-transformers)** is supported by most
  dense classes.

## See also

- [Speculative decoding](speculation.md), [images and videos](images.md)
- [On CPUs](cpu.md), [on a GPU](gpu.md)

"""
_TABLE = """## Every class of transformers

The tables list every class of transformers {version} under `AutoModelForCausalLM`. **{served} of
{all} classes produce the same tokens as their own full forward pass** and are therefore supported.
`python -m docs.generate.architectures` tests them:

1. The command creates a tiny checkpoint with random weights for each class. Models of the BERT
   family are configured as decoders (`is_decoder`).
2. A prefill node and a decode node in one process generate tokens with this checkpoint, in float32
   on a CPU, with and without a cached prefix.
3. The command compares these tokens with those of the class without Baton.
4. The command repeats this with two tensor-parallel [ranks](parallel.md). {divided} classes produce
   the same tokens. The other classes have no plan to divide their layers, so nodes with several
   ranks reject them.

| model_type | class | also with 2 ranks | also native |
|---|---|---|---|
"""
_REST = """
### Classes without support

A node rejects these classes with the reason in the last column, unless a native family serves them.

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
        native, ranks = "yes" if one["native"] else "no", "no" if one["ranks"] else "yes"
        yield f"| {one['kind']} | {one['name']} | {ranks} | {native} |\n"


def _reasons(others: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in others:
        if one["native"]:
            yield f"| {one['kind']} | {one['name']} | supported natively |\n"
            continue
        reason = one["reason"] or f"{one['same']} of {one['asked']} tokens are identical"
        yield f"| {one['kind']} | {one['name']} | {reason.translate(_PLAIN)} |\n"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FOUND.read_text().splitlines()]


if __name__ == "__main__":
    FILE.write_text(page(read()))

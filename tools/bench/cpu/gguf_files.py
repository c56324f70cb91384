"""Write a Qwen3 checkpoint in bfloat16, with tied embeddings, as GGUF for llama.cpp, and as Q8_0.

    LLAMA_PYTHON tools/bench/cpu/gguf_files.py CHECKPOINT DIRECTORY

It writes DIRECTORY/bf16.gguf and q8_0.gguf.

Runs in the Python that has `llama-cpp-python` and `gguf`, and imports nothing of this repository.
The files have no vocabulary, only its size, because prompts and responses are token ids.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    checkpoint, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True, exist_ok=True)
    plain, quantised = directory / "bf16.gguf", directory / "q8_0.gguf"
    _write(checkpoint, plain)
    wish = llama_cpp.llama_model_quantize_default_params()
    wish.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    code = llama_cpp.llama_model_quantize(str(plain).encode(), str(quantised).encode(), wish)
    if code:
        raise SystemExit(f"llama.cpp does not quantise: {code}")


def _write(checkpoint: Path, file: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in _tensors(checkpoint / "model.safetensors"):
        if bits.ndim == 1:  # llama.cpp multiplies norms in float32
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under llama.cpp's name, as the bits of its bfloat16 numbers."""
    raw = np.memmap(file, np.uint8, "r")
    size = int(raw[:8].view(np.uint64)[0])
    header = json.loads(raw[8 : 8 + size].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}: only bfloat16 is written")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        yield _name(name), raw[begin:end].view(np.uint16).reshape(entry["shape"])


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.weight"


if __name__ == "__main__":
    main()

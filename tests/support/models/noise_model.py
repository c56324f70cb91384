"""A tiny checkpoint that generates noise: Qwen3 architecture, one token per byte, ChatML template.

The noise is printable, has no end, and is the same on every machine, because greedy choices have
margins well above rounding differences.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 7
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def write(directory: Path, *, seed: int = SEED) -> None:
    """Write the checkpoint: 0.9 M parameters, float32, 3.5 MB."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    _model(tokenizer, seed).save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer: 256 bytes as in byte-level alphabets, then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    _prefer_printable(model.lm_head.weight, tokenizer)
    return model


@torch.no_grad()
def _prefer_printable(head: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    """Set all logits to 0 except those of printable ASCII and the end, the best of which is higher.

    Args:
        head: [vocabulary, hidden], changed in place.
    """
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    wanted = [
        (len(text) == 1 and " " <= text <= "~") or text == SPECIAL_TOKENS[2] for text in texts
    ]
    head *= torch.tensor(wanted, dtype=head.dtype)[:, None] * 4.0

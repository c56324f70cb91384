"""Tiny models for tokenization: checkpoints without weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT_LENGTH = 64
VOCABULARY_SIZE = 320
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Of a model with tool calls.
LONG_CONTEXT = 2048
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 15}}\n</tool_call>'
CALLING_TEMPLATE = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>
{% endif %}{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{% for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and
not enable_thinking %}<think></think>{% endif %}{% endif %}"""
CALLING_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "</s>")


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and some merges. Ids 0 and 1 are <s>, which starts every text,
    and </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the quick brown fox jumps over the lazy dog; größer STOP"
    tokenizer.train_from_iterator([words] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: words include their leading space, and unknown characters
    are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


def ids(text: str) -> list[int]:
    """Return the tokens of a text without those that start it."""
    tokens: list[int] = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    return tokens


class Spoken:
    """A model's text as its tokens, decoded with all of its markers."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def text(self, token_ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def write_model(
    directory: Path,
    *,
    context_length: int = CONTEXT_LENGTH,
    vocabulary_size: int = VOCABULARY_SIZE,
    markers: Iterable[str] = (),
    **tokenizer_config: Any,
) -> Path:
    """Write a checkpoint without weights.

    Args:
        markers: texts that are special tokens.
    """
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "max_position_embeddings": context_length,
        "vocab_size": vocabulary_size,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    content = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **tokenizer_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory


def calling_model(
    directory: Path, template: str = CALLING_TEMPLATE, markers: Iterable[str] = CALLING_MARKERS
) -> Path:
    """Write a model whose template supports tools, and whose tokenizer has tokens for some
    markers."""
    return write_model(
        directory,
        context_length=LONG_CONTEXT,
        vocabulary_size=400,
        markers=markers,
        chat_template=template,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)

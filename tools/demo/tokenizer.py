"""The demo model's tokenizer: 500 words are one token each, everything else is spelled in bytes.

Text is converted to lower case and uniform spacing, so that `fox=tea,owl=jam` and `Fox = tea, owl =
jam` have the same tokens. A word includes the space in front of it. Digits are bytes, so that a
number is the sequence of its digits.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools.demo.words import COMMANDS, LETTERS, MARKS, WORDS

END, PADDING = "<|end|>", "<|padding|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"  # as in Hermes and Qwen

# A conversation has the format of the training transcript: the user's text, with the equals sign
# that requests a response, and each response with its end. A system message consists of facts.
# Tools are declared by name alone, and a tool's result requests a response as a user message does.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ 'tools' }}
{%- for tool in tools -%}
{{ ' ' + tool.function.name }}
{%- endfor -%}
{{ ', ' }}
{%- endif -%}
{%- for message in messages -%}
{%- set content = (message.content or '') | trim -%}
{%- if message.role == 'assistant' -%}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- else -%}
{{ ' ' + content + '<|end|>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{ 'result ' + content + ' =' }}
{%- elif message.role == 'user' -%}
{{ content.rstrip('= ') + ' =' }}
{%- else -%}
{{ content + ', ' }}
{%- endif -%}
{%- endfor -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer.

    Ids are the bytes of the byte-level alphabet, then marks and words, then added tokens.
    """
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("\u0120" + word for word in (*MARKS, *COMMANDS, *LETTERS, *WORDS))
    vocabulary = {text: index for index, text in enumerate((*bytes_, *words))}
    # Without merges, a word is either one vocabulary entry or a sequence of bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            *(normalizers.Replace(Regex(rf"\s*\{mark}\s*"), f" {mark} ") for mark in MARKS),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, PADDING)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CALL_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )

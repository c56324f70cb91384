"""What is known and not supported, by name, with the values that change nothing; and what changes
no answer whatever it says.

Taken from OpenAI's API and from what vLLM and SGLang add to it. A name that is in neither table,
and no field of the record, is refused all the same; being known spares it a wrong guess at what was
meant, and has it refused where unknown fields are not. Knows no requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Harmless:
    """Values of a field that ask for what happens anyway. Null, "" and [] always do."""

    said: str  # "": there are no others
    holds: Callable[[object], bool]


def asks_nothing(value: object) -> bool:
    return value is None or value == "" or value == []


def only(*values: object) -> Harmless:
    said = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
    return Harmless(said, lambda value: value in values)


_NEVER = only()
_OFF, _ON = only(False), only(True)
_EMPTY = only({})
_NO_BIAS = Harmless(
    "an object of zeros",
    lambda value: isinstance(value, dict) and all(bias == 0 for bias in value.values()),
)
_PLAIN_TEXT = Harmless(
    '`{"type":"text"}`',
    lambda value: isinstance(value, dict) and _given(value) == {"type": "text"},
)

IGNORED: Mapping[str, str] = {
    "cache_prompt": "prompts are always cached",
    "custom_labels": "for metrics of other servers",
    "metadata": "for stored answers; nothing is stored",
    "parallel_tool_calls": "says how tools are called, which are refused",
    "prediction": "the answer guessed; here nothing is quicker by it",
    "prompt_cache_key": "what begins alike is found without one",
    "prompt_cache_options": "as `prompt_cache_key`",
    "prompt_cache_retention": "as `prompt_cache_key`",
    "request_id": "the header X-Request-Id says it",
    "rid": "as `request_id`",
    "safety_identifier": "for reports of abuse",
    "service_tier": "there is only one",
    "session_id": "the header X-Session-Id says it",
    "store": "nothing is stored",
    "truncation_side": "says how `truncate_prompt_tokens` does it, which is refused",
}

UNSUPPORTED: Mapping[str, Harmless] = {
    # other answers
    "best_of": only(1),
    "do_sample": _ON,
    "early_stopping": _OFF,
    "length_penalty": only(1),
    "moderation": _NEVER,
    "no_repeat_ngram_size": only(0),
    "repetition_detection": _EMPTY,
    "typical_p": only(1),
    "use_beam_search": _OFF,
    "watermarking": _OFF,
    # tokens that may not be, or must
    "allowed_token_ids": _NEVER,
    "bad_words": _NEVER,
    "custom_logit_processor": _NEVER,
    "custom_params": _EMPTY,
    "logit_bias": _NO_BIAS,
    "logits_processors": _NEVER,
    # a form that the answer has
    "ebnf": _NEVER,
    "grammar": _NEVER,
    "guided_choice": _NEVER,
    "guided_decoding_backend": _NEVER,
    "guided_grammar": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "json_schema": _NEVER,
    "regex": _NEVER,
    "response_format": _PLAIN_TEXT,
    "structural_tag": _NEVER,
    "structured_outputs": _EMPTY,
    # where it ends, and how it is written
    "detokenize": _ON,
    "echo": _OFF,
    "include_stop_str_in_output": _OFF,
    "no_stop_trim": _OFF,
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "stop_regex": _NEVER,
    "stream_interval": only(1),
    "thinking_token_budget": only(-1),
    # what is told besides
    "logprob_token_ids": _NEVER,
    "prompt_logprobs": _NEVER,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_meta_info": _OFF,
    "return_prompt_text": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_routed_experts": _OFF,
    "return_token_ids": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "routed_experts_prompt_start": only(0),
    "routed_experts_start_len": only(0),
    # other prompts, other models
    "images": _NEVER,
    "lora_path": _NEVER,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "session_params": _EMPTY,
    "truncate_prompt_tokens": _NEVER,
    # where and when it runs
    "kv_transfer_params": _EMPTY,
    "priority": only(0),
    "vllm_xargs": _EMPTY,
}

OF_COMPLETIONS: Mapping[str, Harmless] = {
    **UNSUPPORTED,
    "add_special_tokens": _ON,
    "logprobs": _NEVER,
    "prompt_embeds": _NEVER,
    "suffix": _NEVER,
}

OF_CHATS: Mapping[str, Harmless] = {
    **UNSUPPORTED,
    "add_generation_prompt": _ON,
    "add_special_tokens": _OFF,
    "audio": _NEVER,
    "chat_template": _NEVER,
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "documents": _NEVER,
    "enable_thinking": _NEVER,
    "function_call": only("none", "auto"),
    "functions": _NEVER,
    "include_reasoning": _ON,
    "logprobs": _OFF,
    "modalities": only(["text"]),
    "reasoning": _EMPTY,
    "reasoning_effort": _NEVER,
    "separate_reasoning": _OFF,
    "stream_reasoning": _ON,
    "thinking": _EMPTY,
    "tool_choice": only("none", "auto"),
    "tools": _NEVER,
    "top_logprobs": only(0),
    "verbosity": only("medium"),
    "web_search_options": _NEVER,
}


def _given(value: Mapping[str, object]) -> Mapping[str, object]:
    return {name: inner for name, inner in value.items() if inner is not None}

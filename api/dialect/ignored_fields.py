"""Known request fields that are unsupported or ignored, with their harmless values.

The fields come from OpenAI's API and from extensions of vLLM and SGLang. Fields that are neither
here nor in a record are rejected too. For a known name, the error suggests no other spelling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Values of a field that request the default behaviour. Null, "" and [] always do.

    Attributes:
        said: the harmless values, for errors. "": there are only the empty ones.
        hint: other values are ignored and named in a response header, because the response is
            correct without them.
    """

    said: str
    holds: Callable[[object], bool]
    hint: bool = False


def asks_nothing(value: object) -> bool:
    return value is None or value == "" or value == []


def only(*values: object) -> IgnoredFields:
    said = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
    return IgnoredFields(said, lambda value: value in values)


def hint(*values: object) -> IgnoredFields:
    return replace(only(*values), hint=True)


_NEVER = only()
_ANYTHING = IgnoredFields("anything", lambda value: True)
_OFF, _ON, _EMPTY = only(False), only(True), only({})


def _fields(names: str, harmless: IgnoredFields) -> dict[str, IgnoredFields]:
    """Return an entry for each of the names, which are separated by spaces."""
    return dict.fromkeys(names.split(), harmless)


IGNORED: Mapping[str, str] = {
    "cache_prompt": "prompts are always cached",
    "custom_labels": "labels for metrics, which are not supported",
    "metadata": "for stored responses, which are not supported",
    "parallel_tool_calls": "completions do not call tools",
    "prediction": "only for chat completions",
    "prompt_cache_key": "only for completions, chats and responses",
    "prompt_cache_options": "prompts are cached until their pages are needed",
    "prompt_cache_retention": "see `prompt_cache_options`",
    "request_id": "use the header X-Request-Id",
    "rid": "see `request_id`",
    "safety_identifier": "for abuse reports, which are not supported",
    "service_tier": "there is only one tier",
    "session_id": "use the header X-Session-Id",
    "store": "responses are not stored",
    "truncation_side": "belongs to `truncate_prompt_tokens`, which is rejected",
}

_RETENTION: Mapping[str, IgnoredFields] = {
    "prompt_cache_options": hint(),
    "prompt_cache_retention": hint("in_memory", "in-memory"),
}

_COMMON: Mapping[str, IgnoredFields] = {
    **_RETENTION,
    **_fields(
        "custom_logit_processor grammar images logits_processors logprob_token_ids moderation "
        "prompt_logprobs truncate_prompt_tokens",
        _NEVER,
    ),
    **_fields(
        "early_stopping include_stop_str_in_output no_stop_trim return_cached_tokens_details "
        "return_meta_info return_prompt_text return_prompt_token_ids "
        "return_token_offsets return_tokens_as_token_ids "
        "use_beam_search watermarking",
        _OFF,
    ),
    **_fields("detokenize do_sample skip_special_tokens spaces_between_special_tokens", _ON),
    **_fields(
        "custom_params kv_transfer_params media_io_kwargs mm_processor_kwargs "
        "repetition_detection session_params vllm_xargs",
        _EMPTY,
    ),
    **_fields("no_repeat_ngram_size routed_experts_prompt_start routed_experts_start_len", only(0)),
    **_fields("length_penalty typical_p", only(1)),
    "guided_decoding_backend": hint(),
}

OF_COMPLETIONS: Mapping[str, IgnoredFields] = {
    **_COMMON,
    **_fields("prompt_embeds suffix", _NEVER),
    "add_special_tokens": _ON,
    "thinking_token_budget": only(-1),  # supported by chats
}

OF_CHATS: Mapping[str, IgnoredFields] = {
    **_COMMON,
    **_fields("audio chat_template documents enable_thinking functions web_search_options", _NEVER),
    **_fields("add_special_tokens echo", _OFF),
    **_fields("separate_reasoning stream_reasoning", _ON),
    **_fields("reasoning thinking", _EMPTY),
    "best_of": only(1),
    "function_call": only("none", "auto"),
    "modalities": only(["text"]),
    "verbosity": hint("medium"),
}

OF_RESPONSES: Mapping[str, IgnoredFields] = {
    **_RETENTION,
    **_fields("conversation moderation previous_response_id prompt", _NEVER),
    "background": _OFF,
    "context_management": hint(),
    "include": IgnoredFields(
        "anything but `message.output_text.logprobs`",
        # Reasoning is returned as text anyway. The other values are for built-in tools, which do
        # not exist here.
        lambda value: isinstance(value, list) and "message.output_text.logprobs" not in value,
    ),
    "max_tool_calls": hint(),  # concerns built-in tools
    "top_logprobs": only(0),
    "truncation": IgnoredFields('`"auto"` or `"disabled"`', lambda v: v == "disabled", hint=True),
}

OF_MESSAGES: Mapping[str, IgnoredFields] = {
    **_fields("container mcp_servers", _NEVER),
    **_fields("context_management inference_geo", hint()),
}

OF_COUNTED: Mapping[str, IgnoredFields] = {
    **OF_MESSAGES,
    **_fields("output_config output_format", _ANYTHING),
}

OF_NATIVE: Mapping[str, IgnoredFields] = {
    **_fields(
        "audio_data bootstrap_host bootstrap_port bootstrap_room custom_logit_processor "
        "image_data token_ids_logprob video_data",
        _NEVER,
    ),
    "require_reasoning": _OFF,
    "log_metrics": _ON,
    "session_params": _EMPTY,
}

OF_TOKENIZE: Mapping[str, IgnoredFields] = {
    **_fields("chat_template documents", _NEVER),
    **_fields("media_io_kwargs mm_processor_kwargs", _EMPTY),
}

OF_DETOKENIZE = _fields("skip_special_tokens spaces_between_special_tokens", _ON)

_OF_POOLING: Mapping[str, IgnoredFields] = {
    **_fields("lora_path max_tokens_per_doc truncate_prompt_tokens", _NEVER),
    "mm_processor_kwargs": _EMPTY,
    "priority": only(0),
    "use_activation": _ON,
}

OF_EMBEDDINGS: Mapping[str, IgnoredFields] = {
    **_OF_POOLING,
    **_fields("chat_template messages", _NEVER),
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "normalize": _ON,
}

OF_SCORE: Mapping[str, IgnoredFields] = {**_OF_POOLING, "activation": _ON}

OF_RERANK: Mapping[str, IgnoredFields] = {**OF_SCORE, "rank_fields": _NEVER}

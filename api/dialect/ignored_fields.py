"""Known request fields that are unsupported or ignored, with the values that change nothing.

They come from OpenAI's API and from the extensions of vLLM and SGLang. A field that is in neither
table and in no record is rejected as well. The error of a known name suggests no other spelling.
Independent of requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Values of a field that ask for the default behaviour. Null, "" and [] always do.

    Attributes:
        hint: whether other values are ignored and named in a response header, because the response
            is correct without them.
    """

    said: str  # "": there are no others
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
_OFF, _ON = only(False), only(True)
_EMPTY = only({})

IGNORED: Mapping[str, str] = {
    "cache_prompt": "prompts are always cached",
    "custom_labels": "labels for metrics, which are not supported",
    "metadata": "for stored responses, which are not supported",
    "parallel_tool_calls": "completions do not call tools",
    "prediction": "only for chat completions",
    "prompt_cache_key": "common prefixes are found without a key",
    "prompt_cache_options": "see `prompt_cache_key`",
    "prompt_cache_retention": "see `prompt_cache_key`",
    "request_id": "use the header X-Request-Id",
    "rid": "see `request_id`",
    "safety_identifier": "for abuse reports, which are not supported",
    "service_tier": "there is only one tier",
    "session_id": "use the header X-Session-Id",
    "store": "responses are not stored",
    "truncation_side": "belongs to `truncate_prompt_tokens`, which is rejected",
}

UNSUPPORTED: Mapping[str, IgnoredFields] = {
    # other sampling methods
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
    # required or excluded tokens
    "custom_logit_processor": _NEVER,
    "custom_params": _EMPTY,
    "logits_processors": _NEVER,
    # response formats
    "grammar": _NEVER,
    "guided_decoding_backend": hint(),
    # end and spelling of the text
    "detokenize": _ON,
    "include_stop_str_in_output": _OFF,
    "no_stop_trim": _OFF,
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "stream_interval": hint(1),
    # additional output
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
    # other prompts
    "images": _NEVER,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "session_params": _EMPTY,
    "truncate_prompt_tokens": _NEVER,
    # placement and scheduling
    "kv_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
}

OF_COMPLETIONS: Mapping[str, IgnoredFields] = {
    **{name: harmless for name, harmless in UNSUPPORTED.items() if name != "best_of"},
    "add_special_tokens": _ON,
    "prompt_embeds": _NEVER,
    "suffix": _NEVER,
    "thinking_token_budget": only(-1),  # supported by chats
}

OF_RESPONSES: Mapping[str, IgnoredFields] = {
    "background": _OFF,
    "context_management": hint(),
    "conversation": _NEVER,
    "include": IgnoredFields(
        "anything but `message.output_text.logprobs`",
        # Reasoning is returned as text anyway. The other values belong to built-in tools, which do
        # not exist here.
        lambda value: isinstance(value, list) and "message.output_text.logprobs" not in value,
    ),
    "max_tool_calls": hint(),  # concerns built-in tools
    "moderation": _NEVER,
    "previous_response_id": _NEVER,
    "prompt": _NEVER,
    "top_logprobs": only(0),
    "truncation": IgnoredFields('`"auto"` or `"disabled"`', lambda v: v == "disabled", hint=True),
}

OF_MESSAGES: Mapping[str, IgnoredFields] = {
    "container": _NEVER,
    "context_management": hint(),
    "inference_geo": hint(),
    "mcp_servers": _NEVER,
}

OF_COUNTED: Mapping[str, IgnoredFields] = {
    **OF_MESSAGES,
    "output_config": _ANYTHING,
    "output_format": _ANYTHING,
}

OF_NATIVE: Mapping[str, IgnoredFields] = {
    "audio_data": _NEVER,
    "bootstrap_host": _NEVER,
    "bootstrap_port": _NEVER,
    "bootstrap_room": _NEVER,
    "custom_logit_processor": _NEVER,
    "image_data": _NEVER,
    "input_embeds": _NEVER,
    "log_metrics": _ON,
    "logprob_start_len": only(-1),
    "require_reasoning": _OFF,
    "return_hidden_states": _OFF,
    "return_logprob": _OFF,
    "return_routed_experts": _OFF,
    "return_text_in_logprobs": _ANYTHING,
    "session_params": _EMPTY,
    "token_ids_logprob": _NEVER,
    "top_logprobs_num": only(0),
    "video_data": _NEVER,
}

OF_TOKENIZE: Mapping[str, IgnoredFields] = {
    "chat_template": _NEVER,
    "documents": _NEVER,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
}

OF_DETOKENIZE: Mapping[str, IgnoredFields] = {
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
}

OF_CHATS: Mapping[str, IgnoredFields] = {
    **UNSUPPORTED,
    "add_special_tokens": _OFF,
    "audio": _NEVER,
    "chat_template": _NEVER,
    "documents": _NEVER,
    "echo": _OFF,
    "enable_thinking": _NEVER,
    "function_call": only("none", "auto"),
    "functions": _NEVER,
    "modalities": only(["text"]),
    "reasoning": _EMPTY,
    "separate_reasoning": _ON,
    "stream_reasoning": _ON,
    "thinking": _EMPTY,
    "verbosity": hint("medium"),
    "web_search_options": _NEVER,
}

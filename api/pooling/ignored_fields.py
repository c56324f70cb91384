"""Known fields of these endpoints that are unsupported, with the values that change nothing."""

from collections.abc import Mapping

from api.dialect.ignored_fields import IgnoredFields, only

_NEVER = only()
_ALL: Mapping[str, IgnoredFields] = {
    "lora_path": _NEVER,
    "max_tokens_per_doc": _NEVER,
    "mm_processor_kwargs": only({}),
    "priority": only(0),
    "truncate_prompt_tokens": _NEVER,
}

OF_EMBEDDINGS: Mapping[str, IgnoredFields] = {
    **_ALL,
    "chat_template": _NEVER,
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "messages": _NEVER,
    "normalize": only(True),
    "use_activation": only(True),
}
OF_SCORE: Mapping[str, IgnoredFields] = {
    **_ALL,
    "activation": only(True),
    "use_activation": only(True),
}
OF_RERANK: Mapping[str, IgnoredFields] = {
    **_ALL,
    "activation": only(True),
    "rank_fields": _NEVER,
    "use_activation": only(True),
}

"""The HTTP API as an OpenAPI document, generated from the request records.

This module has the descriptions of fields. Their types come from the records.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from api.admin.engines import COMMANDS, LoadFields, UnloadFields
from api.anthropic.fields import CountTokensFields, MessagesFields
from api.anthropic.messages import TokenCount
from api.native.generate import (
    Detokenized,
    DetokenizeFields,
    NativeFields,
    NativeResponse,
    Tokenized,
    TokenizeFields,
)
from api.openai.chat import ChatChoice, ChatFields, ChunkChoice
from api.openai.completions import CompletionChoice, CompletionFields
from api.openai.replies import OpenAiUsage
from api.openai.responses import ResponseFields
from api.pooling.endpoint import EmbeddingFields, EmbeddingList
from api.pooling.scores import RerankFields, RerankResponse, ScoreFields, ScoreList

Schema = dict[str, Any]
Record: TypeAlias = type[msgspec.Struct]

FIELDS: Mapping[str, str] = {
    "model": "One that `/v1/models` names: the model, which it is where this is absent, or a LoRA "
    "adapter.",
    "lora_path": "SGLang's way to name a LoRA adapter.",
    "prompt": "A text, a list of texts, token ids, or a list of lists of them.",
    "messages": "The conversation, rendered with the model's own chat template.",
    "stream": "Send the answer as server-sent events while it is generated.",
    "stream_interval": "Tokens of each event after the first one. Default: the router's "
    "`stream_interval`, which is 1.",
    "stream_options": "`include_usage`: one more event with the usage before `[DONE]`.",
    "n": "Answers for each prompt; each is a request of its own to the nodes.",
    "best_of": "So many answers are generated, and the `n` whose tokens are the likeliest on "
    "average are returned. Not with `stream`.",
    "max_tokens": "Maximum number of tokens to generate. A value that does not fit into the "
    "context behind the prompt is refused. Default: 16 for completions, else what fits.",
    "max_completion_tokens": "The newer name of `max_tokens`.",
    "temperature": "0: the likeliest token, always.",
    "top_p": "Sample from the smallest set of tokens with at least this probability together.",
    "top_k": "Sample from so many of the likeliest tokens; 0 or -1: from all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one.",
    "min_tokens": "Before so many tokens neither EOS nor what `stop` and `stop_token_ids` say "
    "ends the answer.",
    "seed": "The same seed gives the same tokens, on any node.",
    "stop": "Texts that end the answer; they are not part of it.",
    "stop_regex": "Expressions, as Python writes them: what matches one ends the answer and is no "
    "part of it.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Continue after an end-of-sequence token. No effect with a grammar.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted once from the logit of a token that was generated.",
    "repetition_penalty": "Divides positive, multiplies negative logits of tokens seen so far.",
    "logit_bias": "By token id, from -100 to 100: added to its logit. At most 1024.",
    "allowed_token_ids": "No other token is sampled, EOS neither. At most 4096.",
    "bad_words": "Texts that the answer never has, as the tokenizer writes them. At most 64.",
    "logprobs": "Completions: log probabilities of each token and of this many likely ones, 20 at "
    "most. Chat: whether to return them.",
    "top_logprobs": "Of so many of the likeliest tokens at each place, 20 at most.",
    "return_token_ids": "The answer has `token_ids` of each choice, and `prompt_token_ids`. Of a "
    "stream the first event has the latter.",
    "echo": "The answer begins with its prompt, and so do its log-probabilities. With `max_tokens` "
    "0 it is all there is.",
    "prompt_logprobs_start": "With `echo` and `logprobs`: index of the first prompt token with a "
    "log probability. A cached prefix before it is not computed again.",
    "response_format": "`json_object`, or `json_schema` with a `schema`: the answer is such JSON "
    "and nothing else. With `tools` it may be calls instead.",
    "output_config": "`format`: the answer is JSON of its `schema`, or with `tools` calls. "
    "`effort` is `reasoning_effort`.",
    "output_format": "The older name of `output_config.format`.",
    "structured_outputs": "vLLM's: `json`, `regex`, `choice`, `grammar` or `json_object`.",
    "guided_json": "A JSON schema.",
    "guided_regex": "An expression that all of the answer matches.",
    "guided_choice": "Texts of which the answer is one.",
    "guided_grammar": "A grammar with a rule `root`, in xgrammar's EBNF.",
    "json_schema": "As `guided_json`.",
    "regex": "As `guided_regex`.",
    "ebnf": "As `guided_grammar`.",
    "structural_tag": "Forms with free text beside them, as xgrammar has them.",
    "cache_salt": "What is cached is shared with requests of the same salt, and with no others; "
    "absent: with those that have none. 512 characters at most.",
    "priority": "From -100 to 100: what is higher goes first, or what is lower where the router is "
    "so set. How urgent it may be, its operator says.",
    "chat_template_kwargs": "Variables of the model's chat template, such as `enable_thinking`; "
    "one that it does not have is refused.",
    "reasoning_effort": "The same for this variable. Ignored where the template does not have it.",
    "add_generation_prompt": "false: the prompt ends with the last message, and no new one begins.",
    "continue_final_message": "The answer continues the last message, and is only what it adds.",
    "text": "Of `/generate` a text, or a list of them; of a response its form, which is text.",
    "input_ids": "Token ids, or a list of lists of them, in place of `text`.",
    "sampling_params": "How tokens are chosen, by SGLang's names.",
    "tools": "Functions that the model may call, in OpenAI's form.",
    "system": "Goes before the conversation, as the system's message.",
    "stop_sequences": "`stop`, by the name that Anthropic has for it.",
    "thinking": "enabled: the model thinks `budget_tokens` at most (ignored where it does not "
    "think); disabled: reasoning is omitted.",
    "thinking_token_budget": "Tokens of thought after which it is ended; -1: any number.",
    "thinking_budget": "As `thinking_token_budget`.",
    "input": "A text, or what was said, thought and called so far, each as its item.",
    "instructions": "Goes before the conversation, as the system's message.",
    "max_output_tokens": "`max_tokens`, by the name that responses have for it.",
    "reasoning": "`effort` is `reasoning_effort`.",
    "tool_choice": "`auto`, `none`, `required`, or the tool that must be called.",
    "parallel_tool_calls": "false: only the first of several calls is returned.",
    "include_reasoning": "false: what the model thinks is left out.",
    "add_special_tokens": "false: of a text the tokens alone. A conversation has its template's.",
    "return_token_strs": "Also say how the vocabulary spells each token.",
    "tokens": "Token ids.",
    "encoding_format": "`float`, or `base64`: of little-endian float32.",
    "dimensions": "So many of the first numbers of each embedding, made as long as all of it.",
    "text_1": "A text, or as many as `text_2` has.",
    "text_2": "A text, or a list of them: each is scored with its own of `text_1`, or the only "
    "one.",
    "queries": "`text_1`, by another name.",
    "query": "Of `/rerank`, what documents are ranked by. Of `/v1/score`, a text or token ids that "
    "each of `items` follows.",
    "items": "Texts, or lists of token ids.",
    "label_token_ids": "Tokens whose probability as the next token is returned. At most 256.",
    "apply_softmax": "Probabilities among these tokens alone.",
    "item_first": "`query` follows each item.",
    "documents": "Texts, or objects with a `text`. Of `/v1/score`, `text_2` by another name.",
    "instruct": "Task description for a reranker (`--reranker`).",
    "top_n": "So many of the best; absent or 0: all.",
    "return_documents": "false: their texts are left out of the answer.",
    "prediction": "What is expected of the answer: `type` is `content`, and `content` a text or "
    "parts of text. It changes no answer; nodes that speculate give it sooner where it is right.",
    "prompt_cache_key": "Names requests with a common prefix. They go to the same nodes where the "
    "policy heeds it. It precedes `user`.",
    "user": "Who asks. Requests of one user go to the same nodes where the policy heeds it.",
}

_OF_TOKENS = ("400", "401", "404", "413", "429", "504")
_OTHERS = (
    "Absent and null mean the same. A field that is not listed is refused by name, unless it "
    "changes no answer."
)
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {
                    "enum": ["invalid_request_error", "rate_limit_error", "server_error"],
                },
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_WHERE_ASKED = "Where the router asks for one, see docs/clients.md."
_KEYS: Schema = {
    "key": {"type": "http", "scheme": "bearer", "description": f"An API key. {_WHERE_ASKED}"},
    "operator_key": {
        "type": "http",
        "scheme": "bearer",
        "description": f"An operator's API key, or the cluster's own. {_WHERE_ASKED}",
    },
}
_PROBLEMS: Mapping[str, str] = {
    "400": "A field is wrong, or asks for what is not supported; `param` names it.",
    "401": "No API key, where one is asked for, or none that is good.",
    "403": "A client's key, where an operator's is asked for.",
    "404": "There is no such model, or no such request.",
    "409": "Not as things stand, on a node that the message names.",
    "413": "The body is too large, or has too many values.",
    "429": "A limit of the key, too many live requests, or too much text to tokenise; see "
    "Retry-After.",
    "503": "No usable pair of nodes, or the router is shutting down; see Retry-After.",
    "504": "The request's total budget is spent.",
}


class _Operation(NamedTuple):
    """An operation of the API.

    Attributes:
        fields: record of the request's body. None: there is no body.
        answer: record or schema of the response's body. None: it is not described.
        choices: records of a choice of the response, and of its streamed events.
    """

    summary: str
    fields: Record | None = None
    answer: Record | Schema | None = None
    problems: Iterable[str] = _PROBLEMS
    choices: tuple[Record, ...] = ()
    security: list[Schema] | None = None


def _plain(summary: str, *problems: str) -> _Operation:
    return _Operation(summary, problems=problems)


def _for_operators(summary: str, *problems: str, fields: Record | None = None) -> _Operation:
    security: list[Schema] = [{"operator_key": []}, {}]
    return _Operation(summary, fields, problems=("401", "403", *problems), security=security)


_POSTS: Mapping[str, _Operation] = {
    "/v1/completions": _Operation(
        "Completes a prompt.", CompletionFields, choices=(CompletionChoice, CompletionChoice)
    ),
    "/v1/chat/completions": _Operation(
        "Answers in a chat.", ChatFields, choices=(ChatChoice, ChunkChoice)
    ),
    "/v1/responses": _Operation(
        "Answers in a chat, in the newer form. Nothing is stored; with `stream` the answer is its "
        "events.",
        ResponseFields,
        {"type": "object", "description": "OpenAI's `response`."},
    ),
    "/v1/messages": _Operation(
        "Answers in a chat, in Anthropic's form; with `stream` the answer is its events.",
        MessagesFields,
        {"type": "object", "description": "Anthropic's `message`."},
    ),
    "/v1/messages/count_tokens": _Operation(
        "How many tokens a prompt of Anthropic's form has.",
        CountTokensFields,
        TokenCount,
        _OF_TOKENS,
    ),
    "/generate": _Operation(
        "Generates, in SGLang's own form. A list of prompts, or `n`, makes a list of answers; an "
        "event of a stream has all of its answer so far.",
        NativeFields,
        NativeResponse,
    ),
    "/tokenize": _Operation(
        "Token ids of a prompt, of several, or of a conversation.",
        TokenizeFields,
        Tokenized,
        _OF_TOKENS,
    ),
    "/detokenize": _Operation("The text of token ids.", DetokenizeFields, Detokenized, _OF_TOKENS),
    "/v1/embeddings": _Operation(
        "Embeddings of texts, made by prefill nodes.", EmbeddingFields, EmbeddingList
    ),
    "/v1/score": _Operation(
        "How well texts go together; or with `query`, `items`, `label_token_ids`, in SGLang's "
        "form, how likely these tokens are to follow. `/score`, too.",
        ScoreFields,
        ScoreList,
    ),
    "/v1/rerank": _Operation(
        "Documents in the order in which they suit a query; `/rerank`, too.",
        RerankFields,
        RerankResponse,
    ),
    "/v1/load_lora_adapter": _for_operators(
        "Has all nodes load a LoRA adapter.", "400", fields=LoadFields
    ),
    "/v1/unload_lora_adapter": _for_operators(
        "Has all nodes unload one.", "400", "404", fields=UnloadFields
    ),
    **{
        path: _for_operators(summary, "400", "409", fields=fields)
        for path, (summary, fields) in COMMANDS.items()
    },
}
_GETS: Mapping[str, _Operation] = {
    "/version": _plain("Which version of Baton this is.", "401"),
    "/get_model_info": _plain("The model, in SGLang's format. Also `/model_info`.", "401"),
    "/get_server_info": _plain("The server, in SGLang's format. Also `/server_info`.", "401"),
    "/v1/models": _plain("The model that is served, and its adapters.", "401"),
    "/v1/models/{model}": _plain("The same, by its name.", "401", "404"),
    "/cluster": _for_operators("The nodes, their pages, queues, counters and links."),
    "/requests": _for_operators("Requests under way and the last that ended."),
    "/requests/{id}": _for_operators("Where the time of one request went, by phase.", "404"),
    "/requests/{id}/events": _for_operators("Events of one request on all processes.", "404"),
    "/health": _Operation("The process lives.", problems=(), security=[]),
    "/ready": _Operation("A request could be placed now.", problems=("503",), security=[]),
    "/metrics": _for_operators("Prometheus metrics, as text."),
    "/openapi.json": _plain("This document.", "401"),
}
# Records of requests that clients may send.
REQUESTS = tuple(
    each.fields for each in _POSTS.values() if each.fields is not None and each.security is None
)


def document(version: str) -> Schema:
    """Return the whole OpenAPI 3.1 document. `version` is Baton's."""
    records = [
        record
        for each in _POSTS.values()
        for record in (each.fields, each.answer, *each.choices)
        if isinstance(record, type)
    ]
    types: list[Any] = [*dict.fromkeys(records), OpenAiUsage]
    found, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(types, found, strict=True))
    for record in REQUESTS:
        components[record.__name__]["description"] = _OTHERS
        for name, field in components[record.__name__]["properties"].items():
            field["description"] = FIELDS[name]
    components["Error"] = _ERROR
    posts = {path: {"post": _described(each, schemas)} for path, each in _POSTS.items()}
    gets = {
        path: {**_parameters(path), "get": _described(each, schemas)}
        for path, each in _GETS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version,
            "description": "OpenAI's API for text, and what operators ask of a router.",
        },
        "paths": {**posts, **gets},
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{"key": []}, {}],
    }


def _described(operation: _Operation, schemas: Mapping[Record, Schema]) -> Schema:
    """Return the description of an operation.

    Args:
        schemas: by record.
    """
    body: Schema = {}
    if operation.fields is not None:
        schema = schemas[operation.fields]
        content = {"application/json": {"schema": schema}}
        body["requestBody"] = {"required": True, "content": content}
    answer: Schema = {"description": "OK"}
    if operation.choices:
        answer["description"] = "The answer; with `stream` its pieces, and `[DONE]` at the end."
        answer["content"] = {
            kind: {"schema": _envelope(schemas[choice], schemas[OpenAiUsage])}
            for kind, choice in zip(
                ("application/json", "text/event-stream"), operation.choices, strict=True
            )
        }
    elif (told := operation.answer) is not None:
        schema = schemas[told] if isinstance(told, type) else told
        answer["content"] = {"application/json": {"schema": schema}}
    secured = {} if operation.security is None else {"security": operation.security}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    problems = {
        status: {"description": _PROBLEMS[status], "content": error}
        for status in operation.problems
    }
    return {
        "summary": operation.summary,
        **body,
        "responses": {"200": answer, **problems},
        **secured,
    }


def _envelope(choice: Schema, usage: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer", "description": "Seconds since 1970."},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "system_fingerprint": {
                "type": ["string", "null"],
                "description": "Hash of the weights and all else that decides the tokens.",
            },
            "usage": usage,
        },
    }


def _parameters(path: str) -> Schema:
    """Return the parameters within a path, {} if it has none."""
    common = {"in": "path", "required": True, "schema": {"type": "string"}}
    names = re.findall("{(.*?)}", path)
    return {"parameters": [{"name": name, **common} for name in names]} if names else {}

"""The HTTP API as an OpenAPI document, generated from the request records.

Descriptions of fields are here. Their types come from the records.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from api.admin.engines import ADAPTER_COMMANDS, COMMANDS
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
    "model": "Name of the model or of a LoRA adapter, as `/v1/models` lists it. Default: the "
    "model.",
    "lora_path": "Name of a LoRA adapter (SGLang's field).",
    "prompt": "A text, a list of texts, token ids, or a list of token id lists.",
    "messages": "The conversation, rendered with the model's chat template.",
    "stream": "Send the response as server-sent events while it is generated.",
    "stream_interval": "Number of tokens in each event after the first one. Default: the router's "
    "`stream_interval`, which is 1.",
    "stream_options": "`include_usage`: send one more event with the usage before `[DONE]`.",
    "n": "Number of responses for each prompt. Each one is scheduled as a request of its own.",
    "best_of": "Number of responses to generate for each prompt. The `n` responses with the "
    "highest mean log-probability are returned. Not with `stream`.",
    "max_tokens": "Maximum number of tokens to generate. A value that exceeds the context after "
    "the prompt is rejected. Default: 16 for completions, otherwise the rest of the context.",
    "max_completion_tokens": "Newer name of `max_tokens`.",
    "temperature": "Sampling temperature. 0: greedy.",
    "top_p": "Sample from the smallest set of tokens whose total probability reaches this value.",
    "top_k": "Sample from this many most likely tokens. 0 or -1: all tokens.",
    "min_p": "Exclude tokens whose probability is below this share of the highest one.",
    "min_tokens": "Minimum number of tokens before EOS, `stop` or `stop_token_ids` can end the "
    "response.",
    "seed": "Random seed. The same seed gives the same tokens on every node.",
    "stop": "Texts that end the response. They are not included in it.",
    "stop_regex": "Python regular expressions. A match ends the response and is not included in "
    "it.",
    "stop_token_ids": "Tokens that end the response.",
    "ignore_eos": "Continue after an end-of-sequence token. No effect with a grammar.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted once from the logit of a token that was generated.",
    "repetition_penalty": "Divides positive and multiplies negative logits of tokens in the "
    "prompt and the response.",
    "logit_bias": "Value from -100 to 100 for each token id, added to its logit. At most 1024.",
    "allowed_token_ids": "The only tokens that can be sampled. EOS is excluded unless listed. At "
    "most 4096.",
    "bad_words": "Texts that the response must not contain, as the tokenizer encodes them. At "
    "most 64.",
    "logprobs": "Completions: number of most likely tokens to return log-probabilities of, at most "
    "20, in addition to the generated token. Chat: whether to return log-probabilities.",
    "top_logprobs": "Number of most likely tokens to return log-probabilities of, at most 20.",
    "return_token_ids": "Return `token_ids` of each choice, and `prompt_token_ids`. In a stream "
    "the first event has `prompt_token_ids`.",
    "return_hidden_states": "Return hidden states of the model's last layer, as SGLang does. The "
    "nodes must have `--engine.hidden-states.enabled`.",
    "input_embeds": "Inputs of the first layer in place of token ids: a matrix [tokens, hidden "
    "size], or a list of them. The nodes must have `--engine.input-embeddings.enabled`.",
    "return_routed_experts": "Return the experts of each token in each layer, as SGLang does. The "
    "nodes must have `--engine.routed-experts.enabled`.",
    "echo": "Begin the response with the prompt, and with its log-probabilities if requested. "
    "`max_tokens` 0 returns only the prompt.",
    "prompt_logprobs_start": "With `echo` and `logprobs`: index of the first prompt token with a "
    "log-probability. A cached prefix before it is not computed again.",
    "return_logprob": "Return log-probabilities of generated tokens in `meta_info`.",
    "top_logprobs_num": "With `return_logprob`: number of likeliest tokens at each position, at "
    "most 20.",
    "logprob_start_len": "With `return_logprob`: index of the first prompt token with a "
    "log-probability. A cached prefix before it is not computed again. -1: none of the prompt.",
    "return_text_in_logprobs": "Log-probabilities have the text of their tokens.",
    "response_format": "`json_object`, or `json_schema` with a `schema`: the response is only such "
    "JSON. With `tools` it can be tool calls instead.",
    "output_config": "`format`: the response is JSON of its `schema`, or tool calls if there are "
    "`tools`. `effort` is `reasoning_effort`.",
    "output_format": "Older name of `output_config.format`.",
    "structured_outputs": "vLLM's field, with `json`, `regex`, `choice`, `grammar` or "
    "`json_object`.",
    "guided_json": "A JSON schema that the response must match.",
    "guided_regex": "A regular expression that the whole response must match.",
    "guided_choice": "Texts. The response is one of them.",
    "guided_grammar": "A grammar in xgrammar's EBNF with a rule `root`.",
    "json_schema": "Same as `guided_json`.",
    "regex": "Same as `guided_regex`.",
    "ebnf": "Same as `guided_grammar`.",
    "structural_tag": "A structural tag of xgrammar: constrained parts within free text.",
    "cache_salt": "Share cached KV only with requests that have the same salt. Default: share it "
    "with all requests without a salt. At most 512 characters.",
    "priority": "From -100 to 100, higher first, or lower first if the router is configured so. "
    "The operator limits the highest value of a client.",
    "chat_template_kwargs": "Variables of the model's chat template, such as `enable_thinking`. A "
    "variable that the template does not use is rejected.",
    "reasoning_effort": "The template variable of this name. Ignored if the template does not use "
    "it.",
    "add_generation_prompt": "false: end the prompt with the last message, without a new one.",
    "continue_final_message": "Continue the last message. The response has only the new part.",
    "text": "`/generate`: a text or a list of texts. `/v1/responses`: the format of the response.",
    "input_ids": "Token ids, or a list of token id lists, instead of `text`.",
    "sampling_params": "Sampling parameters, by SGLang's names.",
    "tools": "Functions that the model may call, in OpenAI's format.",
    "system": "System message before the conversation.",
    "stop_sequences": "Anthropic's name of `stop`.",
    "thinking": "enabled: at most `budget_tokens` of reasoning. Ignored if the model does not "
    "reason. disabled: the response has no reasoning.",
    "thinking_token_budget": "Maximum number of reasoning tokens. -1: no limit.",
    "thinking_budget": "Same as `thinking_token_budget`.",
    "input": "A text, or the previous messages, reasoning and tool calls as items.",
    "instructions": "System message before the conversation.",
    "max_output_tokens": "Name of `max_tokens` in the responses API.",
    "reasoning": "`effort` is `reasoning_effort`.",
    "tool_choice": "`auto`, `none`, `required`, or the tool that must be called.",
    "parallel_tool_calls": "false: only the first of several calls is returned.",
    "include_reasoning": "false: reasoning is not returned.",
    "add_special_tokens": "false: encode a text without special tokens. A conversation has the "
    "special tokens of its template.",
    "return_token_strs": "Also return each token as the vocabulary spells it.",
    "tokens": "Token ids.",
    "encoding_format": "`float`, or `base64` of little-endian float32.",
    "dimensions": "Number of leading dimensions of each embedding to return, normalised again.",
    "text_1": "A text, or as many texts as `text_2` has.",
    "text_2": "A text or a list of texts. Each is scored with its counterpart in `text_1`, or with "
    "the only one.",
    "queries": "Another name of `text_1`.",
    "query": "`/v1/rerank`: the text by which documents are ranked. `/v1/score`: text or token ids "
    "before each of `items`.",
    "items": "Texts, or lists of token ids.",
    "label_token_ids": "Tokens whose probability as the next token is returned. At most 256.",
    "apply_softmax": "Return probabilities among these tokens only.",
    "item_first": "Place `query` after each item.",
    "documents": "Texts, or objects with a `text`. `/v1/score`: another name of `text_2`.",
    "instruct": "Task description for a reranker (`--reranker`).",
    "top_n": "Number of best documents to return. Default or 0: all.",
    "return_documents": "false: the response does not contain the texts.",
    "prediction": "Expected response: `type` is `content`, and `content` is a text or a list of "
    "text parts. It does not change the response. Nodes with speculative decoding respond faster "
    "if it is right.",
    "prompt_cache_key": "Name for requests with a common prefix. Policies with sessions send "
    "them to the same nodes. It takes precedence over `user`.",
    "user": "User of the request. Policies with sessions send a user's requests to the same nodes.",
}

_OF_TOKENS = ("400", "401", "404", "413", "429", "504")
_OTHERS = (
    "An absent field is the same as null. A field that is not listed is rejected by name if it "
    "could affect the response."
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
                "param": {"type": ["string", "null"], "description": "The invalid field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_WHEN_REQUIRED = "Needed if the router requires one, see docs/clients.md."
_KEYS: Schema = {
    "key": {"type": "http", "scheme": "bearer", "description": f"An API key. {_WHEN_REQUIRED}"},
    "operator_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "An operator's API key, or one derived from the cluster secret. "
        + _WHEN_REQUIRED,
    },
}
_PROBLEMS: Mapping[str, str] = {
    "400": "A field is invalid or not supported. `param` names it.",
    "401": "The API key is missing or invalid.",
    "403": "An operator's key is required, and a client's key was sent.",
    "404": "The model or the request does not exist.",
    "409": "A node refused the command. The message names the node and the reason.",
    "413": "The body is too large or has too many values.",
    "429": "A rate limit of the key, too many requests, or too much text to tokenize. See "
    "Retry-After.",
    "503": "No usable pair of nodes, or the router is shutting down. See Retry-After.",
    "504": "The request's total budget has expired.",
}


class _Operation(NamedTuple):
    """An operation of the API.

    Attributes:
        fields: record of the request's body. None: there is no body.
        answer: record or schema of the response's body. None: not described.
        choices: records of a choice in the response, and in streamed events.
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
        "Complete a prompt.", CompletionFields, choices=(CompletionChoice, CompletionChoice)
    ),
    "/v1/chat/completions": _Operation(
        "Respond to a conversation.", ChatFields, choices=(ChatChoice, ChunkChoice)
    ),
    "/v1/responses": _Operation(
        "Respond to a conversation, in the format of the responses API. Nothing is stored. With "
        "`stream` the response is a stream of its events.",
        ResponseFields,
        {"type": "object", "description": "OpenAI's `response`."},
    ),
    "/v1/messages": _Operation(
        "Respond to a conversation, in Anthropic's format. With `stream` the response is a stream "
        "of its events.",
        MessagesFields,
        {"type": "object", "description": "Anthropic's `message`."},
    ),
    "/v1/messages/count_tokens": _Operation(
        "Count the tokens of a prompt in Anthropic's format.",
        CountTokensFields,
        TokenCount,
        _OF_TOKENS,
    ),
    "/generate": _Operation(
        "Generate, in SGLang's native format. A list of prompts, or `n`, returns a list of "
        "responses. Each event of a stream has the whole response so far.",
        NativeFields,
        NativeResponse,
    ),
    "/tokenize": _Operation(
        "Return the token ids of one prompt, several prompts or a conversation.",
        TokenizeFields,
        Tokenized,
        _OF_TOKENS,
    ),
    "/detokenize": _Operation(
        "Return the text of token ids.", DetokenizeFields, Detokenized, _OF_TOKENS
    ),
    "/v1/embeddings": _Operation(
        "Return embeddings of texts. Prefill nodes compute them.", EmbeddingFields, EmbeddingList
    ),
    "/v1/score": _Operation(
        "Score pairs of texts. With `query`, `items` and `label_token_ids` (SGLang's format): "
        "return the probability of each label as the next token. Also `/score`.",
        ScoreFields,
        ScoreList,
    ),
    "/v1/rerank": _Operation(
        "Sort documents by their relevance to a query. Also `/rerank`.",
        RerankFields,
        RerankResponse,
    ),
    **{
        path: _for_operators(each.summary, "400", "404", fields=each.fields)
        for path, each in ADAPTER_COMMANDS.items()
    },
    **{
        path: _for_operators(each.summary, "400", "409", fields=each.fields)
        for path, each in COMMANDS.items()
    },
}
_GETS: Mapping[str, _Operation] = {
    "/version": _plain("The version of Baton.", "401"),
    "/get_model_info": _plain("The model, in SGLang's format. Also `/model_info`.", "401"),
    "/get_server_info": _plain("The server, in SGLang's format. Also `/server_info`.", "401"),
    "/v1/models": _plain("The served model and its LoRA adapters.", "401"),
    "/v1/models/{model}": _plain("One model or adapter, by its name.", "401", "404"),
    "/cluster": _for_operators("The nodes, their pages, queues, counters and links."),
    "/requests": _for_operators("Running requests and the last ones that ended."),
    "/requests/{id}": _for_operators("Timeline of one request, by phase.", "404"),
    "/requests/{id}/events": _for_operators("Events of one request on all processes.", "404"),
    "/health": _Operation("Liveness: the process runs.", problems=(), security=[]),
    "/ready": _Operation("Readiness: a request can be placed now.", problems=("503",), security=[]),
    "/metrics": _for_operators("Prometheus metrics."),
    "/openapi.json": _plain("This document.", "401"),
}
# Records of requests that clients may send.
REQUESTS = tuple(
    each.fields for each in _POSTS.values() if each.fields is not None and each.security is None
)


@cache
def encoded(version: str) -> bytes:
    """Return `document` as JSON."""
    return msgspec.json.encode(document(version))


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
            "description": "APIs compatible with OpenAI, Anthropic and SGLang, and commands for "
            "operators.",
        },
        "paths": {**posts, **gets},
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{"key": []}, {}],
    }


def _described(operation: _Operation, schemas: Mapping[Record, Schema]) -> Schema:
    """Return the OpenAPI object of an operation. `schemas`: the schema of each record."""
    body: Schema = {}
    if operation.fields is not None:
        schema = schemas[operation.fields]
        content = {"application/json": {"schema": schema}}
        body["requestBody"] = {"required": True, "content": content}
    answer: Schema = {"description": "OK"}
    if operation.choices:
        answer["description"] = "The response. With `stream`: its parts, and `[DONE]` at the end."
        answer["content"] = {
            kind: {"schema": _envelope(schemas[choice], schemas[OpenAiUsage])}
            for kind, choice in zip(
                ("application/json", "text/event-stream"), operation.choices, strict=True
            )
        }
    elif (response := operation.answer) is not None:
        schema = schemas[response] if isinstance(response, type) else response
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
                "description": "Hash of the weights and of all settings that affect the tokens.",
            },
            "usage": usage,
        },
    }


def _parameters(path: str) -> Schema:
    """Return the parameters within a path, {} if it has none."""
    common = {"in": "path", "required": True, "schema": {"type": "string"}}
    names = re.findall("{(.*?)}", path)
    return {"parameters": [{"name": name, **common} for name in names]} if names else {}

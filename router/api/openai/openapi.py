"""The HTTP API as an OpenAPI document, made of the records that requests are read into.

What a field means is told here, beside no code that could do something else; what it may be comes
from the record itself.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.api.openai.chat import ChatFields, ChunkChoice
from router.api.openai.chat import Choice as ChatChoice
from router.api.openai.completions import Choice, CompletionFields
from router.api.openai.replies import Usage

Schema = dict[str, Any]

FIELDS: Mapping[str, str] = {
    "model": "Must be what `/v1/models` names; absent: that one.",
    "prompt": "A text, a list of texts, token ids, or a list of lists of them.",
    "messages": "The conversation, rendered with the model's own chat template.",
    "stream": "Send the answer as server-sent events while it is generated.",
    "stream_options": "`include_usage`: one more event before `[DONE]` tells the usage.",
    "n": "Answers for each prompt; each is a request of its own to the nodes.",
    "max_tokens": "Tokens to generate at most. Completions: 16; chat: what the context leaves.",
    "max_completion_tokens": "The newer name of `max_tokens`.",
    "temperature": "0: the likeliest token, always.",
    "top_p": "Sample from the smallest set of tokens with at least this probability together.",
    "top_k": "Sample from so many of the likeliest tokens; 0 or -1: from all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one.",
    "min_tokens": "Only together with `ignore_eos` and without `stop`.",
    "seed": "The same seed gives the same tokens, on any node.",
    "stop": "Texts that end the answer; they are not part of it.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Go on after an end-of-sequence token, until `max_tokens`.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted once from the logit of a token that was generated.",
    "repetition_penalty": "Divides positive, multiplies negative logits of tokens seen so far.",
    "cache_salt": "What is cached is shared with requests of the same salt, and with no others; "
    "absent: with those that have none. 512 characters at most.",
    "user": "Who asks. Requests of one user go to the same nodes where the policy heeds it.",
}

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
    "413": "The body is too large, or has too many values.",
    "429": "A limit of the key, too many live requests, or too much text to tokenise; see "
    "Retry-After.",
    "503": "No usable pair of nodes, or the router is shutting down; see Retry-After.",
    "504": "The request's total budget is spent.",
}


def document(version: str) -> Schema:
    """The whole document, OpenAPI 3.1. `version` is Baton's."""
    records, components = msgspec.json.schema_components(
        [CompletionFields, ChatFields, Choice, ChatChoice, ChunkChoice, Usage],
        ref_template="#/components/schemas/{name}",
    )
    completion, chat, text_choice, chat_choice, chunk_choice, usage = records
    for record in ("CompletionFields", "ChatFields"):
        components[record]["description"] = _OTHERS
        for name, field in components[record]["properties"].items():
            field["description"] = FIELDS[name]
    components["Error"] = _ERROR
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version,
            "description": "OpenAI's API for text, and what operators ask of a router.",
        },
        "paths": {
            "/v1/completions": {
                "post": _generation(
                    "Completes a prompt.", completion, text_choice, text_choice, usage
                )
            },
            "/v1/chat/completions": {
                "post": _generation("Answers in a chat.", chat, chat_choice, chunk_choice, usage)
            },
            "/v1/models": {"get": _plain("The model that is served.", "401")},
            "/v1/models/{model}": {
                "parameters": [_in_path("model")],
                "get": _plain("The same, by its name.", "401", "404"),
            },
            "/cluster": {
                "get": _for_operators("The nodes, their pages, queues, counters and links.")
            },
            "/requests": {"get": _for_operators("Requests under way and the last that ended.")},
            "/requests/{id}": {
                "parameters": [_in_path("id")],
                "get": _for_operators("Where the time of one request went, by phase.", "404"),
            },
            "/health": {"get": _for_anybody("The process lives.")},
            "/ready": {"get": _for_anybody("A request could be placed now.", "503")},
            "/metrics": {"get": _for_operators("Prometheus metrics, as text.")},
            "/openapi.json": {"get": _plain("This document.", "401")},
        },
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{"key": []}, {}],
    }


def _generation(
    summary: str, fields: Schema, choice: Schema, chunk: Schema, usage: Schema
) -> Schema:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": fields}}},
        "responses": {
            "200": {
                "description": "The answer; with `stream` its pieces, and `[DONE]` at the end.",
                "content": {
                    "application/json": {"schema": _envelope(choice, usage)},
                    "text/event-stream": {"schema": _envelope(chunk, usage)},
                },
            },
            **_problems(*_PROBLEMS),
        },
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
            "usage": usage,
        },
    }


def _plain(summary: str, *problems: str) -> Schema:
    return {"summary": summary, "responses": {"200": {"description": "OK"}, **_problems(*problems)}}


def _for_operators(summary: str, *problems: str) -> Schema:
    security: list[Schema] = [{"operator_key": []}, {}]
    return {**_plain(summary, "401", "403", *problems), "security": security}


def _for_anybody(summary: str, *problems: str) -> Schema:
    return {**_plain(summary, *problems), "security": []}


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _problems(*statuses: str) -> Schema:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _PROBLEMS[status], "content": error} for status in statuses}

"""Responses that are expensive to parse or to send: white space before tool calls, and long
streams."""

import json
from random import Random
from typing import Any

from tests.attack.posts import CHAT, GENERATE, post
from tests.attack.target import Target

NUM_WORKERS = 2

_NUM_TOKENS = 4000
_SPACES = ["220", "198"]  # a space and a line break of the demo model
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def spaces(target: Target, draw: Random) -> None:
    """Request only spaces where a call might start."""
    allowed = [int(draw.choice(_SPACES))]
    await _chat(target, draw, tool_choice="auto", allowed_token_ids=allowed)


async def spaces_in_a_call(target: Target, draw: Random) -> None:
    """Request as many spaces as the grammar of a call allows."""
    bias = dict.fromkeys(_SPACES, 100)
    await _chat(target, draw, tool_choice="required", logit_bias=bias)


async def whole_text_in_each_event(target: Target, draw: Random) -> None:
    sampling = {"max_new_tokens": _NUM_TOKENS, "ignore_eos": True, "n": draw.choice((1, 6))}
    body = {"text": "add 1 2 =", "stream": True, "sampling_params": sampling}
    await post(target, GENERATE, json.dumps(body).encode())


async def _chat(target: Target, draw: Random, **fields: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": _TOOLS,
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "stream": draw.random() < 0.5,
        **fields,
    }
    await post(target, CHAT, json.dumps(body).encode())

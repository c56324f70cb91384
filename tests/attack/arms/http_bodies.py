"""Complete HTTP requests whose bodies are valid or corrupted JSON: too large, too deep, of wrong
types."""

import json
from random import Random
from typing import Any

from tests.attack.posts import CHAT, COMPLETIONS, post
from tests.attack.random_messages import mutated
from tests.attack.target import Target

NUM_WORKERS = 3

_PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "add 1 2 ="},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
_PATHS = tuple(_PROMPTS)
_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "stream", "stream_options", "seed", "logit_bias", "tools", "tool_choice", "logprobs"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "user"),
    *("response_format", "echo", "suffix", "best_of", "ignore_eos", "cache_salt", "timeout", "x"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32 - 1, 2**63, 10**400, 0.0, -0.5, 1e308, "", "a"),
    *("a" * 3000, "\x00", "\ud83d\ude00" * 50, [], [1], ["a"], [[1], [2]], [["a"]], {}, {"a": 1}),
    *([{"role": "user", "content": "hi"}], [{"role": "", "content": None}], [{}] * 50),
    *({"include_usage": True}, [2**32 - 1], [-1], {"1": 1000}, "127", [0] * 2100, "max"),
)


async def odd_fields(target: Target, draw: Random) -> None:
    path = draw.choice(_PATHS)
    body = {**_PROMPTS[path], "max_tokens": 4}
    for _ in range(draw.randint(1, 5)):
        body[draw.choice(_FIELDS)] = draw.choice(_VALUES)
    await post(target, path, json.dumps(body).encode())


async def broken_json(target: Target, draw: Random) -> None:
    body = json.dumps({"prompt": "add 1 2 =", "stop": ["a", "b"], "max_tokens": 4}).encode()
    await post(target, draw.choice(_PATHS), mutated(body, draw))


async def heavy(target: Target, draw: Random) -> None:
    """Send bodies of a few megabytes that are as expensive to parse as possible."""
    size = draw.choice((50_000, 1_000_000, 11_000_000))
    start, part, end_part, end = draw.choice(_HEAVY)
    count = size // (len(part) + len(end_part))
    body = start + part * count + end_part * count + end
    await post(target, draw.choice(_PATHS), body.encode())


async def many_biases(target: Target, draw: Random) -> None:
    """Send a bias of as many tokens as fit."""
    pairs = (f'"{number}":1' for number in range(draw.choice((50_000, 1_000_000)) // 12))
    body = f'{{"prompt":"a","logit_bias":{{{",".join(pairs)}}}}}'
    await post(target, draw.choice(_PATHS), body.encode())


# Start of a body, a part that is repeated, another one as often, and the end.
_HEAVY = (
    ('{"prompt":"', "word and ", "", '"}'),
    ('{"prompt":"', "a", "", '"}'),
    ('{"prompt":[', "[],", "", "[]]}"),
    ('{"prompt":[', "1,", "", "1]}"),
    ('{"messages":[', "{},", "", "{}]}"),
    ('{"tools":', "[", "]", "}"),
    ('{"prompt":"a","tools":[', "{},", "", "{}]}"),
    ('{"prompt":"a","model":"', "m", "", '"}'),
)

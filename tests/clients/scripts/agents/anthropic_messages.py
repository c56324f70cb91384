"""Anthropic's own client: a tool used, whole and streamed."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), auth_token="x", max_retries=0)
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
messages = [{"role": "user", "content": "add 27 and 15"}]
asked = {"model": model, "max_tokens": 200, "tools": [TOOL]}
message = client.messages.create(**asked, messages=messages)
thought, used = message.content
assert (thought.type, thought.thinking) == ("thinking", "I should add"), message
assert (used.name, used.input) == ("add", {"a": 27, "b": 15}), message
with client.messages.stream(**asked, messages=messages) as stream:
    streamed = stream.get_final_message()
assert streamed.content[1].input == used.input, streamed
assert streamed.stop_reason == "tool_use"
messages += [
    {"role": "assistant", "content": message.content},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "42"}],
    },
]
assert client.messages.create(**asked, messages=messages).content[-1].text == "It is 42."

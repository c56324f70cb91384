"""Anthropic's own client: a tool call, streamed and not, a schema, and errors."""

import sys

import anthropic
from pydantic import BaseModel

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
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "42"}]},
]
assert client.messages.create(**asked, messages=messages).content[-1].text == "It is 42."


class Sum(BaseModel):
    answer: int


parsed = client.messages.parse(
    model=model,
    max_tokens=200,
    messages=[{"role": "user", "content": "27 + 15"}],
    output_format=Sum,
)
assert parsed.parsed_output == Sum(answer=42), parsed
with_tool = client.messages.parse(**asked, messages=messages, output_format=Sum)
assert with_tool.parsed_output == Sum(answer=42), with_tool
managed = client.beta.messages.create(
    **asked,
    messages=messages,
    betas=["context-management-2025-06-27"],
    context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
)
assert managed.content[-1].text == "It is 42."
try:
    client.messages.create(model="none", max_tokens=1, messages=messages)
except anthropic.NotFoundError as error:
    kind = error.body["error"]["type"]
else:
    kind = "none"
assert kind == "not_found_error", kind

"""LiteLLM: tools, streamed and not, and reasoning text."""

import sys

import litellm

url, model = sys.argv[1:]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
asked = {
    "model": f"openai/{model}",
    "api_base": url,
    "api_key": "x",
    "messages": [{"role": "user", "content": "add 27 and 15"}],
    "tools": [TOOL],
}
message = litellm.completion(**asked).choices[0].message
(call,) = message.tool_calls
assert (call.function.name, call.function.arguments) == ("add", '{"a": 27, "b": 15}'), call
assert message.reasoning_content == "I should add", message
chunks = list(litellm.completion(**asked, stream=True))
built = litellm.stream_chunk_builder(chunks)
assert built.choices[0].message.tool_calls[0].function.arguments == '{"a": 27, "b": 15}', built
reported = {"role": "tool", "tool_call_id": call.id, "content": "42"}
asked["messages"] += [message.model_dump(), reported]
assert litellm.completion(**asked).choices[0].message.content == "It is 42."

"""LangChain: a chat model with a tool, streamed and not."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


for over_responses in (False, True):
    chat = ChatOpenAI(model=model, base_url=url, api_key="x", use_responses_api=over_responses)
    adding = chat.bind_tools([add])
    messages = [HumanMessage("add 27 and 15")]
    answer = adding.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 27, "b": 15}), call
    streamed = None
    for chunk in adding.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"a": 27, "b": 15}, streamed
    messages += [answer, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    assert "It is 42." in str(adding.invoke(messages).content)

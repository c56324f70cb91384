"""A router whose model calls tools, and a node that says what such a model would."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from protos.decode_pb2 import FINISH_REASON_STOP
from tests.api.openai.openai_rig import HELLO, Api, api_for
from tests.api.rig import write_model

CONTEXT = 2048
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 15}}\n</tool_call>'
TEMPLATE = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{% for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and
not enable_thinking %}<think></think>{% endif %}{% endif %}"""
SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "</s>"]


def calling_model(directory: Path) -> Path:
    """One whose template knows tools, and whose tokenizer takes some markers for special."""
    model = write_model(directory, chat_template=TEMPLATE)
    file = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(file))
    config = model / "config.json"
    config.write_text(config.read_text().replace(" 64,", f" {CONTEXT},").replace("320", "400"))
    return model


class Spoken:
    """Text of such a model as its tokens, and back with all of its markers."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def text(self, token_ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class Talk:
    """With a router, and with the node that answers."""

    def __init__(self, api: Api, model: Path) -> None:
        self.api = api
        self.client = api.client.chat.completions
        self._spoken = Spoken(model)
        self.ids = self._spoken.ids
        self.text = self._spoken.text

    async def asked(self) -> tuple[int, str]:
        """The number of the next request at the node, and its prompt."""
        submit = await self.api.node.submitted()
        return submit.number, self._spoken.text(submit.token_ids)

    async def answer(self, text: str, *, reason: Any = FINISH_REASON_STOP) -> str:
        number, prompt = await self.asked()
        self.api.node.say({number: self.ids(text)}, ended={number: reason})
        return prompt

    async def ask(self, text: str, **fields: Any) -> tuple[Any, str]:
        """The choice that `text` becomes, and the prompt."""
        fields = {"messages": HELLO, "model": self.api.model, **fields}
        asking = asyncio.create_task(self.client.create(**fields))
        prompt = await self.answer(text)
        return (await asking).choices[0], prompt


@asynccontextmanager
async def talk(model: Path, **knobs: Any) -> AsyncIterator[Talk]:
    async with api_for(model, **knobs) as api:
        yield Talk(api, model)

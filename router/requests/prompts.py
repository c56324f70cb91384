"""Makes token ids of every form that a prompt can have, and refuses what cannot fit the context.

Size is looked at before anything is made of a prompt: bytes before a template is rendered, bytes
before tokens are counted, and a number of tokens before one of them is.
"""

from collections.abc import Sequence

from common.errors import InvalidRequest
from router.requests.wanted import (
    Messages,
    Nothing,
    Prompt,
    SharedPrompt,
    Text,
    TokenIds,
    Turn,
)
from router.text.chat_template import ChatTemplate
from router.text.limits import MAX_MESSAGES, Limits, check_length, check_prompt
from router.text.tokenizer import RouterTokenizer, num_bytes

# Of text for each token of the context. What has more is rarely short enough; encoded whole it
# could take a hundred times its bytes.
_DOUBTFUL_BYTES_PER_TOKEN = 4


class Prompts:
    """For one event loop."""

    def __init__(
        self, tokenizer: RouterTokenizer, chat_template: ChatTemplate | None, limits: Limits
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._limits = limits

    async def checked(self, prompt: Prompt | SharedPrompt) -> Sequence[int]:
        """Token ids that the model knows, and that leave room for an answer.

        Raises:
            InvalidRequest: there is no prompt, the model has no such form, or it does not fit.
            Overloaded: too much text waits to be tokenised.
        """
        match prompt:
            case SharedPrompt():
                async with prompt.turn:
                    if prompt.token_ids is None:
                        prompt.token_ids = await self.checked(prompt.prompt)
                return prompt.token_ids
            case _:
                token_ids = await self.encode(prompt)
                check_prompt(token_ids, self._limits, prompt.field)
                return token_ids

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids, perhaps none or some that the model does not know. Raises as `checked`."""
        match prompt:
            case Text():
                return await self._encode(prompt.text, prompt.field, add_special_tokens=True)
            case TokenIds():
                check_length(prompt.token_ids, self._limits, prompt.field)
                return list(prompt.token_ids)
            case Messages():
                text = self._render(prompt)
                return await self._encode(text, prompt.field, add_special_tokens=False)
            case Nothing():
                raise InvalidRequest(f"prompt is missing: set one of {', '.join(prompt.one_of)}")

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> Sequence[int]:
        context, size = self._limits.context_length, num_bytes(text)
        if size > self._limits.text_bytes:
            raise self._too_long(field, size)
        if size > context * _DOUBTFUL_BYTES_PER_TOKEN and await self._tokenizer.surely_exceeds(
            text, context
        ):
            raise InvalidRequest(
                f"{field} has more than {context} tokens; the context of {context} tokens "
                f"takes prompts of at most {context - 1}"
            )
        token_ids = await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        check_length(token_ids, self._limits, field)
        return token_ids

    def _render(self, messages: Messages) -> str:
        if self._chat_template is None:
            raise InvalidRequest("messages: this model has no chat template; send text instead")
        if not messages.turns:
            raise InvalidRequest("messages must have at least one message")
        if len(messages.turns) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has {len(messages.turns)} messages, {MAX_MESSAGES} allowed"
            )
        turns = [_as_templates_know_it(turn) for turn in messages.turns]
        size = sum(num_bytes(text) for turn in turns for text in turn.values())
        if size > self._limits.text_bytes:
            raise self._too_long(messages.field, size)
        for number, turn in enumerate(turns):
            if not turn["role"]:
                raise InvalidRequest(f"messages[{number}].role is empty")
        return self._chat_template.render(turns, max_characters=self._limits.text_bytes)

    def _too_long(self, field: str, size: int) -> InvalidRequest:
        return InvalidRequest(
            f"{field} has {size} bytes of text; the context of {self._limits.context_length} "
            f"tokens takes at most {self._limits.text_bytes}"
        )


def _as_templates_know_it(turn: Turn) -> dict[str, str]:
    told = {"role": turn.role, "content": turn.content}
    return told if turn.name is None else told | {"name": turn.name}

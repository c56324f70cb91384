"""/v1/messages/count_tokens: the number of tokens of a conversation and its tools."""

import msgspec
from aiohttp import web

from api.anthropic import fields as asked_for
from api.anthropic.fields import CountTokensFields
from api.auth.client import Client
from api.dialect.bodies import BodyReader
from api.dialect.ignored_fields import OF_COUNTED
from api.dialect.problems import ANTHROPIC
from api.dialect.prompt_endpoint import PromptEndpoint
from api.dialect.tools import offered
from api.http.request import HttpRequest
from api.requests.generate_params import ChatPrompt
from api.requests.served_model import ServedModel


class TokenCount(msgspec.Struct):
    input_tokens: int


class CountTokens:
    """HTTP handler for /v1/messages/count_tokens."""

    def __init__(
        self, model: ServedModel, endpoint: PromptEndpoint, *, ignore_unknown: bool
    ) -> None:
        """
        Args:
            ignore_unknown: see BodyReader.
        """
        self._model = model
        self._endpoint = endpoint
        self._reader = BodyReader(CountTokensFields, OF_COUNTED, ignore_unknown=ignore_unknown)

    async def __call__(self, request: HttpRequest) -> web.Response:
        return await self._endpoint.answered(request, self._reader, self._count, ANTHROPIC)

    async def _count(self, fields: CountTokensFields, client: Client) -> TokenCount:
        choice, named = asked_for.chosen(fields)
        tools = asked_for.tools(fields)
        offer = offered(tools, choice, named, self._model.speech, parallel=None)
        prompt = ChatPrompt(asked_for.turns(fields), offer.shown)
        return TokenCount(len(await self._model.prompts.encode(prompt, client)))

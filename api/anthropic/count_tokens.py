"""/v1/messages/count_tokens: the number of tokens of a conversation and its tools."""

import msgspec
from aiohttp import web

from api.anthropic import fields as asked_for
from api.anthropic.fields import CountTokensFields
from api.auth.client import Client
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.ignored_fields import OF_COUNTED
from api.dialect.model_names import ModelNames
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
        self,
        model: ServedModel,
        endpoint: PromptEndpoint,
        *,
        names: ModelNames,
        ignore_unknown: bool,
    ) -> None:
        """
        Args:
            names: see GenerationEndpoint.
            ignore_unknown: see BodyReader.
        """
        self._model = model
        self._endpoint = endpoint
        self._names = names
        self._reader = BodyReader(CountTokensFields, OF_COUNTED, ignore_unknown=ignore_unknown)

    async def __call__(self, request: HttpRequest) -> web.Response:
        async def answer(client: Client) -> TokenCount:
            ignored: list[str] = []
            fields = self._reader.read(take_json(request), ignored)
            name_ignored(request, ignored)
            self._names.adapter(fields.model)
            choice, named = asked_for.chosen(fields)
            tools = asked_for.tools(fields)
            offer = offered(tools, choice, named, self._model.speech, parallel=None)
            prompt = ChatPrompt(asked_for.turns(fields), offer.shown)
            return TokenCount(len(await self._model.prompts.encode(prompt, client)))

        return await self._endpoint.answered(request, answer, self._reader.names, ANTHROPIC)

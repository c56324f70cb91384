"""/v1/messages/count_tokens: how many tokens a conversation and its tools have."""

import msgspec
from aiohttp import web

from router.api.anthropic import fields as asked_for
from router.api.anthropic.fields import CountedFields
from router.api.dialect.bodies import BodyReader, name_ignored, take_json
from router.api.dialect.harmless import OF_COUNTED
from router.api.dialect.model_names import ModelNames
from router.api.dialect.problems import ANTHROPIC
from router.api.dialect.prompt_endpoint import PromptEndpoint
from router.api.dialect.tools import offered
from router.api.http.request import Request
from router.clients.client import Client
from router.requests.served_model import ServedModel
from router.requests.wanted import Messages


class Counted(msgspec.Struct):
    input_tokens: int


class CountTokens:
    """A handler of HTTP requests."""

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
            names: as of GenerationEndpoint.
            ignore_unknown: as of BodyReader.
        """
        self._model = model
        self._endpoint = endpoint
        self._names = names
        self._reader = BodyReader(CountedFields, OF_COUNTED, ignore_unknown=ignore_unknown)

    async def __call__(self, request: Request) -> web.Response:
        async def answer(client: Client) -> Counted:
            ignored: list[str] = []
            fields = self._reader.read(take_json(request), ignored)
            name_ignored(request, ignored)
            self._names.adapter(fields.model)
            choice, named = asked_for.chosen(fields)
            tools = asked_for.tools(fields)
            offer = offered(tools, choice, named, self._model.speech, parallel=None)
            prompt = Messages(asked_for.turns(fields), offer.shown)
            return Counted(len(await self._model.prompts.encode(prompt, client)))

        return await self._endpoint.answered(request, answer, self._reader.names, ANTHROPIC)

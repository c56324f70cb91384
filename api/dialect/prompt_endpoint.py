"""Endpoints that process a prompt without generation, with the same limits as generation."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from api.auth.client import Client
from api.dialect import problems
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.generation_endpoint import Begin
from api.dialect.model_names import ModelNames
from api.dialect.problems import OPENAI, ApiError, Words
from api.http.answers import whole
from api.http.request import HttpRequest
from api.requests.deadline import DeadlineScope
from common.errors import ServingError

F = TypeVar("F", bound=msgspec.Struct)


class PromptEndpoint:
    """The shared part of such handlers."""

    def __init__(self, begin: Begin, names: ModelNames, budget_s: float) -> None:
        """
        Args:
            begin, names: see GenerationEndpoint.
            budget_s: time limit of a request, in seconds.
        """
        self._begin = begin
        self._names = names
        self._budget_s = budget_s

    async def answered(
        self,
        request: HttpRequest,
        reader: BodyReader[F],
        answer: Callable[[F, Client], Awaitable[msgspec.Struct]],
        words: Words = OPENAI,
    ) -> web.Response:
        """Run a handler within the limits and return its response.

        Args:
            reader: of the body, whose record has a `model`.
            answer: called with the fields and the client. Raises ApiError or ServingError.
            words: error vocabulary.
        """
        try:
            client = self._begin(request, 1)
            with DeadlineScope(self._budget_s):
                ignored: list[str] = []
                fields: Any = reader.read(take_json(request), ignored)
                name_ignored(request, ignored)
                self._names.adapter(fields.model)
                return whole(200, msgspec.json.encode(await answer(fields, client)))
        except ApiError as refusal:
            return refusal.in_words(words).response()
        except ServingError as error:
            return problems.of_error(error, reader.names).in_words(words).response()

"""Endpoints that process a prompt without generation, with the same limits as generation."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from api.auth.client import Client
from api.dialect import problems
from api.dialect.generation_endpoint import Begin
from api.dialect.problems import OPENAI, ApiError, Fields, Words
from api.http.answers import whole
from api.http.request import HttpRequest
from api.requests.deadline import DeadlineScope
from common.errors import ServingError


class PromptEndpoint:
    """The shared part of such handlers."""

    def __init__(self, begin: Begin, budget_s: float) -> None:
        """
        Args:
            begin: see GenerationEndpoint.
            budget_s: time limit of a request, in seconds.
        """
        self._begin = begin
        self._budget_s = budget_s

    async def answered(
        self,
        request: HttpRequest,
        answer: Callable[[Client], Awaitable[msgspec.Struct]],
        names: Fields,
        words: Words = OPENAI,
    ) -> web.Response:
        """Run a handler within the limits and return its response.

        Args:
            answer: called with the client. Raises ApiError or ServingError.
            names: fields that a request may have.
            words: error vocabulary.
        """
        try:
            client = self._begin(request, 1)
            with DeadlineScope(self._budget_s):
                return whole(200, msgspec.json.encode(await answer(client)))
        except ApiError as refusal:
            return refusal.in_words(words).response()
        except ServingError as error:
            return problems.of_error(error, names).in_words(words).response()

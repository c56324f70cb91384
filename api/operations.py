"""Endpoints without generation: model information and health probes."""

import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from api import openapi
from api.dialect.model_names import ModelNames
from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import HttpRequest
from common.version import VERSION

MODELS_PATH = "/v1/models"


class AdminOperations:
    """HTTP handlers of these endpoints."""

    def __init__(
        self,
        names: ModelNames,
        context_length: int,
        why_not_ready: Callable[[], str | None],
    ) -> None:
        """
        Args:
            names: model names that clients may use.
            why_not_ready: returns a sentence, or None if a request could be placed now.
        """
        self._names, model_name = names, names.served
        self._model: Mapping[str, Any] = {
            "id": model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "baton",
            # Fields of vLLM's server that its clients need.
            "root": model_name,
            "parent": None,
            "max_model_len": context_length,
            "permission": [],
        }
        self._version = {"version": VERSION}
        # Fields of SGLang's server.
        self._model_info = {
            "model_path": model_name,
            "tokenizer_path": model_name,
            "is_generation": True,
        }
        self._server_info = {
            **self._model_info,
            **self._version,
            "served_model_name": model_name,
            "context_length": context_length,
            "max_model_len": context_length,
            "internal_states": [{}],
        }
        self._why_not_ready = why_not_ready
        self._openapi = msgspec.json.encode(openapi.document(VERSION))

    async def models(self, request: HttpRequest) -> web.Response:
        adapters = [self._adapter(name) for name in self._names.adapters]
        content = {"object": "list", "data": [self._model, *adapters]}
        return whole(200, msgspec.json.encode(content))

    async def model(self, request: HttpRequest) -> web.Response:
        name = unquote(request.route.removeprefix(f"{MODELS_PATH}/"))
        try:
            adapter = self._names.adapter(name)
        except ApiError as refusal:
            return refusal.response()
        found = self._adapter(adapter) if adapter else self._model
        return whole(200, msgspec.json.encode(found))

    def _adapter(self, name: str) -> Mapping[str, Any]:
        return {**self._model, "id": name, "root": name, "parent": self._names.served}

    async def version(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._version))

    async def model_info(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._model_info))

    async def server_info(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._server_info))

    async def health(self, request: HttpRequest) -> web.Response:
        """Return 200, for liveness probes."""
        return whole(200, b'{"status":"alive"}')

    async def ready(self, request: HttpRequest) -> web.Response:
        reason = self._why_not_ready()
        if reason is None:
            return whole(200, b'{"status":"ready"}')
        return whole(503, msgspec.json.encode({"status": "not ready", "reason": reason}))

    async def openapi(self, request: HttpRequest) -> web.Response:
        return whole(200, self._openapi)

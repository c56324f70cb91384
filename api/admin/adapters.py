"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM, for operators."""

from typing import Annotated

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, take_json
from api.dialect.ignored_fields import IgnoredFields, only
from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import Handler, HttpRequest
from common.errors import ServingError
from router.cluster.adapter_calls import AdapterCalls

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_UNSUPPORTED: dict[str, IgnoredFields] = {"load_inplace": only(False), "lora_int_id": only()}


class LoadFields(msgspec.Struct, kw_only=True):
    lora_name: _Text
    lora_path: _Text


class UnloadFields(msgspec.Struct, kw_only=True):
    lora_name: _Text


class AdaptersEndpoint:
    """HTTP handlers that load and unload LoRA adapters."""

    def __init__(self, calls: AdapterCalls) -> None:
        self._calls = calls
        self._load = BodyReader(LoadFields, _UNSUPPORTED, ignore_unknown=False)
        self._unload = BodyReader(UnloadFields, _UNSUPPORTED, ignore_unknown=False)

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and HTTP method."""
        return {LOAD_PATH: {"POST": self.load}, UNLOAD_PATH: {"POST": self.unload}}

    async def load(self, request: HttpRequest) -> web.Response:
        try:
            fields = self._load.read(take_json(request))
            await self._calls.load(fields.lora_name, fields.lora_path)
        except ApiError as refusal:
            return refusal.response()
        except ServingError as error:
            return problems.of_error(error, self._load.names).response()
        return _done(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(self, request: HttpRequest) -> web.Response:
        try:
            fields = self._unload.read(take_json(request))
            await self._calls.unload(fields.lora_name)
        except ApiError as refusal:
            return refusal.response()
        except ServingError as error:
            return problems.of_error(error, self._unload.names).response()
        return _done(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


def _done(sentence: str) -> web.Response:
    return whole(200, sentence.encode(), "text/plain; charset=utf-8")

"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM, for operators."""

from typing import Annotated

import msgspec

from api.admin.command import OperatorCommand
from api.dialect.ignored_fields import IgnoredFields, only
from api.http.request import Handler
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

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and HTTP method."""
        return {
            LOAD_PATH: {"POST": OperatorCommand(LoadFields, self._load, _UNSUPPORTED)},
            UNLOAD_PATH: {"POST": OperatorCommand(UnloadFields, self._unload, _UNSUPPORTED)},
        }

    async def _load(self, fields: LoadFields) -> str:
        await self._calls.load(fields.lora_name, fields.lora_path)
        return f"Success: LoRA adapter '{fields.lora_name}' added successfully."

    async def _unload(self, fields: UnloadFields) -> str:
        await self._calls.unload(fields.lora_name)
        return f"Success: LoRA adapter '{fields.lora_name}' removed successfully."

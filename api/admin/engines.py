"""Engine and LoRA adapter commands for operators over HTTP, compatible with SGLang and vLLM."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, take_json
from api.dialect.ignored_fields import IgnoredFields, only
from api.dialect.problems import ApiError
from api.http.messages import Handler, HttpRequest, whole
from api.requests.served_model import ByModel
from common.errors import FailedPrecondition, ServingError
from protos import router_pb2
from router.cluster.engine_calls import AdapterCalls, EngineCalls


class OperatorCommand(NamedTuple):
    """A command: its description, its request, and its work.

    Attributes:
        run: called with the model's EngineCalls or AdapterCalls and the request's fields. Returns
            the JSON object or the text of the response.
        unsupported: further fields of the request, see BodyReader.
    """

    summary: str
    fields: type["ModelFields"]
    run: Callable[[Any, Any], Awaitable[Mapping[str, Any] | str]]
    unsupported: Mapping[str, IgnoredFields]


class CommandEndpoint:
    """HTTP handler of one command."""

    def __init__(
        self, command: OperatorCommand, calls: ByModel[EngineCalls] | ByModel[AdapterCalls]
    ) -> None:
        self._reader = BodyReader(command.fields, command.unsupported, ignore_unknown=False)
        self._run = command.run
        self._calls = calls

    async def __call__(self, request: HttpRequest) -> web.Response:
        try:
            fields = self._reader.read(_json(request))
            done = await self._run(self._calls.of(fields.model), fields)
        except ApiError as refusal:
            return refusal.response()
        except FailedPrecondition as error:
            return ApiError(409, str(error)).response()
        except ServingError as error:
            return problems.of_error(error, self._reader.names).response()
        if isinstance(done, str):
            return whole(200, done.encode(), "text/plain; charset=utf-8")
        return whole(200, msgspec.json.encode(done))


def _json(request: HttpRequest) -> bytes:
    """Return the request's JSON body.

    An empty body counts as {} unless a web page may have sent it.
    """
    if not request.body and not request.header("origin"):
        request.take_body()
        return b"{}"
    return take_json(request)


def routes(
    engines: ByModel[EngineCalls], adapters: ByModel[AdapterCalls]
) -> dict[str, dict[str, Handler]]:
    """Return the handlers by path and HTTP method."""
    handlers: dict[str, Handler] = {
        **{path: CommandEndpoint(each, engines) for path, each in COMMANDS.items()},
        **{path: CommandEndpoint(each, adapters) for path, each in ADAPTER_COMMANDS.items()},
    }
    return {path: {"POST": handler} for path, handler in handlers.items()}


class ModelFields(msgspec.Struct, kw_only=True):
    """The field of every command: the served model. Absent: the only one."""

    model: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class PauseFields(ModelFields, kw_only=True):
    mode: str = ""


class UpdateFields(ModelFields, kw_only=True):
    model_path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    abort_all_requests: bool = False


class PullWeightsFields(ModelFields, kw_only=True):
    node: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    abort_all_requests: bool = False


class MemoryFields(ModelFields, kw_only=True):
    tags: Annotated[list[str], msgspec.Meta(max_length=8)] | None = None


class ProfileFields(ModelFields, kw_only=True):
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None


_OF_ALL: Mapping[str, IgnoredFields] = {
    "is_async": only(False),
    "torch_empty_cache": only(True, False),
}
# Further fields that SGLang's clients may send, if the value matches the existing behaviour.
_OF_UPDATES: Mapping[str, IgnoredFields] = {
    "load_format": only("auto", "safetensors"),
    "flush_cache": only(True),
    **_OF_ALL,
    "keep_pause": only(False),
    "recapture_cuda_graph": only(False),
    "token_step": only(0),
    "weight_version": only(),
    "manifest": only(),
}
_OF_PROFILES: Mapping[str, IgnoredFields] = {
    "activities": only(["CPU"], ["GPU"], ["CPU", "GPU"]),
    "output_dir": only(),
    "start_step": only(0),
    "with_stack": only(False),
    "record_shapes": only(False),
    "profile_by_stage": only(False),
}
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_OF_ADAPTERS: Mapping[str, IgnoredFields] = {"load_inplace": only(False), "lora_int_id": only()}


class LoadFields(ModelFields, kw_only=True):
    lora_name: _Text
    lora_path: _Text


class UnloadFields(ModelFields, kw_only=True):
    lora_name: _Text


async def _pause(calls: EngineCalls, fields: PauseFields) -> Mapping[str, Any]:
    paused = await calls.pause(fields.mode)
    return {"status": "paused", "aborted": paused.aborted}


async def _continue(calls: EngineCalls, fields: ModelFields) -> Mapping[str, Any]:
    await calls.resume()
    return {"status": "continued"}


async def _update(calls: EngineCalls, fields: UpdateFields) -> Mapping[str, Any]:
    return _updated(await calls.update_weights(fields.model_path, abort=fields.abort_all_requests))


async def _pull(calls: EngineCalls, fields: PullWeightsFields) -> Mapping[str, Any]:
    return _updated(await calls.take_weights(fields.node, abort=fields.abort_all_requests))


async def _release(calls: EngineCalls, fields: MemoryFields) -> Mapping[str, Any]:
    await calls.release_memory(fields.tags or ())
    return {"status": "released"}


async def _resume(calls: EngineCalls, fields: MemoryFields) -> Mapping[str, Any]:
    await calls.resume_memory(fields.tags or ())
    return {"status": "resumed"}


async def _profile(calls: EngineCalls, fields: ProfileFields) -> Mapping[str, Any]:
    return _traces("profiling", await calls.start_profile(fields.num_steps or 0))


async def _end_profile(calls: EngineCalls, fields: ModelFields) -> Mapping[str, Any]:
    return _traces("written", await calls.stop_profile())


async def _flush(calls: EngineCalls, fields: ModelFields) -> Mapping[str, Any]:
    flushed = await calls.flush_caches()
    return {"status": "flushed", "pages_freed": flushed.pages_freed}


async def _load(calls: AdapterCalls, fields: LoadFields) -> str:
    await calls.load(fields.lora_name, fields.lora_path)
    return f"Success: LoRA adapter '{fields.lora_name}' added successfully."


async def _unload(calls: AdapterCalls, fields: UnloadFields) -> str:
    await calls.unload(fields.lora_name)
    return f"Success: LoRA adapter '{fields.lora_name}' removed successfully."


def _updated(done: router_pb2.UpdateWeightsResponse) -> Mapping[str, Any]:
    weights = done.id.hex()
    return {"success": True, "message": f"weights {weights}", "weights": weights}


def _traces(status: str, response: router_pb2.ProfilesResponse) -> Mapping[str, Any]:
    profiles = [
        {"role": each.role, "address": each.address, "path": each.path}
        for each in response.profiles
    ]
    return {"status": status, "profiles": profiles}


COMMANDS: Mapping[str, OperatorCommand] = {
    "/pause_generation": OperatorCommand(
        "Pause inference on all nodes of the model.", PauseFields, _pause, _OF_ALL
    ),
    "/continue_generation": OperatorCommand(
        "Resume inference on all nodes of the model.", ModelFields, _continue, _OF_ALL
    ),
    "/update_weights_from_disk": OperatorCommand(
        "Load other weights of the model on all nodes, from a directory.",
        *(UpdateFields, _update, _OF_UPDATES),
    ),
    "/update_weights_from_node": OperatorCommand(
        "Copy the weights of one node to all other nodes of the model.",
        *(PullWeightsFields, _pull, _OF_ALL),
    ),
    "/release_memory_occupation": OperatorCommand(
        "Release the memory of all nodes of the model.", MemoryFields, _release, _OF_ALL
    ),
    "/resume_memory_occupation": OperatorCommand(
        "Allocate the released memory again on all nodes of the model.",
        *(MemoryFields, _resume, _OF_ALL),
    ),
    "/start_profile": OperatorCommand(
        "Profile the next steps of all nodes of the model with torch's profiler.",
        *(ProfileFields, _profile, _OF_PROFILES),
    ),
    "/stop_profile": OperatorCommand(
        "End the profile, and wait until the traces are written.",
        *(ModelFields, _end_profile, _OF_ALL),
    ),
    "/flush_cache": OperatorCommand(
        "Clear the prefix caches of all nodes of the model.", ModelFields, _flush, _OF_ALL
    ),
}
ADAPTER_COMMANDS: Mapping[str, OperatorCommand] = {
    "/v1/load_lora_adapter": OperatorCommand(
        "Load a LoRA adapter on all nodes.", LoadFields, _load, _OF_ADAPTERS
    ),
    "/v1/unload_lora_adapter": OperatorCommand(
        "Unload a LoRA adapter from all nodes.", UnloadFields, _unload, _OF_ADAPTERS
    ),
}

"""Engine and LoRA adapter commands for operators over HTTP, compatible with SGLang and vLLM."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import web
from google.protobuf.message import Message

from api.dialect import problems
from api.dialect.bodies import BodyReader, take_json
from api.dialect.ignored_fields import IgnoredFields, only
from api.dialect.problems import ApiError
from api.http.messages import Handler, HttpRequest, whole
from common.errors import FailedPrecondition, ServingError
from protos import router_pb2 as pb


class OperatorCommand(NamedTuple):
    """A command over HTTP, which calls a method of the Router gRPC service.

    Attributes:
        method: name of the method.
        request: makes its request from the fields of the body, without the model.
        done: returns the JSON object or the text of the response.
        unsupported: further fields of the body, see BodyReader.
    """

    summary: str
    fields: type["ModelFields"]
    method: str
    request: Callable[[Any], Message]
    done: Callable[[Any, Any], Mapping[str, Any] | str]
    unsupported: Mapping[str, IgnoredFields]


class CommandEndpoint:
    """HTTP handler of one command."""

    def __init__(
        self, command: OperatorCommand, methods: Mapping[str, Callable[[Any], Awaitable[Any]]]
    ) -> None:
        self._reader = BodyReader(command.fields, command.unsupported, ignore_unknown=False)
        self._command = command
        self._call = methods[command.method]

    async def __call__(self, request: HttpRequest) -> web.Response:
        try:
            fields = self._reader.read(_json(request))
            message: Any = self._command.request(fields)
            message.model = fields.model
            done = self._command.done(fields, await self._call(message))
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
    methods: Mapping[str, Callable[[Any], Awaitable[Any]]],
) -> dict[str, dict[str, Handler]]:
    """Return the handlers by path and HTTP method.

    Args:
        methods: methods of the Router gRPC service by name.
    """
    commands = {**COMMANDS, **ADAPTER_COMMANDS}
    return {path: {"POST": CommandEndpoint(each, methods)} for path, each in commands.items()}


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


def _updated(fields: Any, done: pb.UpdateWeightsResponse) -> Mapping[str, Any]:
    weights = done.id.hex()
    return {"success": True, "message": f"weights {weights}", "weights": weights}


def _profiles(status: str, done: pb.ProfilesResponse) -> Mapping[str, Any]:
    profiles = [
        {"role": each.role, "address": each.address, "path": each.path} for each in done.profiles
    ]
    return {"status": status, "profiles": profiles}


COMMANDS: Mapping[str, OperatorCommand] = {
    "/pause_generation": OperatorCommand(
        "Pause inference on all nodes of the model.",
        PauseFields,
        "Pause",
        lambda fields: pb.PauseRequest(mode=fields.mode),
        lambda _, done: {"status": "paused", "aborted": done.aborted},
        _OF_ALL,
    ),
    "/continue_generation": OperatorCommand(
        "Resume inference on all nodes of the model.",
        ModelFields,
        "Continue",
        lambda _: pb.ContinueRequest(),
        lambda *_: {"status": "continued"},
        _OF_ALL,
    ),
    "/update_weights_from_disk": OperatorCommand(
        "Load other weights of the model on all nodes, from a directory.",
        UpdateFields,
        "UpdateWeights",
        lambda fields: pb.UpdateWeightsRequest(
            path=fields.model_path, abort=fields.abort_all_requests
        ),
        _updated,
        _OF_UPDATES,
    ),
    "/update_weights_from_node": OperatorCommand(
        "Copy the weights of one node to all other nodes of the model.",
        PullWeightsFields,
        "UpdateWeights",
        lambda fields: pb.UpdateWeightsRequest(
            from_node=fields.node, abort=fields.abort_all_requests
        ),
        _updated,
        _OF_ALL,
    ),
    "/release_memory_occupation": OperatorCommand(
        "Release the memory of all nodes of the model.",
        MemoryFields,
        "ReleaseMemory",
        lambda fields: pb.ReleaseMemoryRequest(tags=fields.tags),
        lambda *_: {"status": "released"},
        _OF_ALL,
    ),
    "/resume_memory_occupation": OperatorCommand(
        "Allocate the released memory again on all nodes of the model.",
        MemoryFields,
        "ResumeMemory",
        lambda fields: pb.ResumeMemoryRequest(tags=fields.tags),
        lambda *_: {"status": "resumed"},
        _OF_ALL,
    ),
    "/start_profile": OperatorCommand(
        "Profile the next steps of all nodes of the model with torch's profiler.",
        ProfileFields,
        "StartProfile",
        lambda fields: pb.StartProfileRequest(num_steps=fields.num_steps or 0),
        lambda _, done: _profiles("profiling", done),
        _OF_PROFILES,
    ),
    "/stop_profile": OperatorCommand(
        "End the profile, and wait until the traces are written.",
        ModelFields,
        "StopProfile",
        lambda _: pb.StopProfileRequest(),
        lambda _, done: _profiles("written", done),
        _OF_ALL,
    ),
    "/flush_cache": OperatorCommand(
        "Clear the prefix caches of all nodes of the model.",
        ModelFields,
        "FlushCache",
        lambda _: pb.FlushCacheRequest(),
        lambda _, done: {"status": "flushed", "pages_freed": done.pages_freed},
        _OF_ALL,
    ),
}
ADAPTER_COMMANDS: Mapping[str, OperatorCommand] = {
    "/v1/load_lora_adapter": OperatorCommand(
        "Load a LoRA adapter on all nodes.",
        LoadFields,
        "LoadAdapter",
        lambda fields: pb.LoadAdapterRequest(name=fields.lora_name, path=fields.lora_path),
        lambda fields, _: f"Success: LoRA adapter '{fields.lora_name}' added successfully.",
        _OF_ADAPTERS,
    ),
    "/v1/unload_lora_adapter": OperatorCommand(
        "Unload a LoRA adapter from all nodes.",
        UnloadFields,
        "UnloadAdapter",
        lambda fields: pb.UnloadAdapterRequest(name=fields.lora_name),
        lambda fields, _: f"Success: LoRA adapter '{fields.lora_name}' removed successfully.",
        _OF_ADAPTERS,
    ),
}

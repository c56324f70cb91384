"""Engine and LoRA adapter commands for operators over HTTP, compatible with SGLang and vLLM.

/pause_generation, /continue_generation, /update_weights_from_disk, /release_memory_occupation,
/resume_memory_occupation, /start_profile, /stop_profile, /flush_cache, and in addition
/update_weights_from_node.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

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

F = TypeVar("F", bound=msgspec.Struct)


class OperatorCommand(Generic[F]):
    """HTTP handler of one command."""

    def __init__(
        self,
        fields: type[F],
        run: Callable[[F], Awaitable[Mapping[str, Any] | str]],
        unsupported: Mapping[str, IgnoredFields],
    ) -> None:
        """
        Args:
            run: runs the command. Returns the JSON object or the text of the response.
            unsupported: see BodyReader.
        """
        self._reader = BodyReader(fields, unsupported, ignore_unknown=False)
        self._run = run

    async def __call__(self, request: HttpRequest) -> web.Response:
        try:
            done = await self._run(self._reader.read(_json(request)))
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


PAUSE_PATH, CONTINUE_PATH = "/pause_generation", "/continue_generation"
FLUSH_PATH = "/flush_cache"
UPDATE_PATH, TAKE_PATH = "/update_weights_from_disk", "/update_weights_from_node"
RELEASE_PATH, RESUME_PATH = "/release_memory_occupation", "/resume_memory_occupation"
PROFILE_PATH, END_PROFILE_PATH = "/start_profile", "/stop_profile"


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
# Summary and request fields of each path.
COMMANDS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    PAUSE_PATH: ("Pause inference on all nodes of the model.", PauseFields),
    CONTINUE_PATH: ("Resume inference on all nodes of the model.", ModelFields),
    UPDATE_PATH: ("Load other weights of the model on all nodes, from a directory.", UpdateFields),
    TAKE_PATH: ("Copy the weights of one node to all other nodes of the model.", PullWeightsFields),
    RELEASE_PATH: ("Release the memory of all nodes of the model.", MemoryFields),
    RESUME_PATH: ("Allocate the released memory again on all nodes of the model.", MemoryFields),
    PROFILE_PATH: (
        "Profile the next steps of all nodes of the model with torch's profiler.",
        ProfileFields,
    ),
    END_PROFILE_PATH: ("End the profile, and wait until the traces are written.", ModelFields),
    FLUSH_PATH: ("Clear the prefix caches of all nodes of the model.", ModelFields),
}


class EnginesEndpoint:
    """HTTP handlers of the engine commands."""

    def __init__(self, calls: ByModel[EngineCalls]) -> None:
        self._calls = calls

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and HTTP method."""
        return {
            PAUSE_PATH: {"POST": OperatorCommand(PauseFields, self._pause, _OF_ALL)},
            CONTINUE_PATH: {"POST": OperatorCommand(ModelFields, self._continue, _OF_ALL)},
            UPDATE_PATH: {"POST": OperatorCommand(UpdateFields, self._update, _OF_UPDATES)},
            TAKE_PATH: {"POST": OperatorCommand(PullWeightsFields, self._take, _OF_ALL)},
            RELEASE_PATH: {"POST": OperatorCommand(MemoryFields, self._release, _OF_ALL)},
            RESUME_PATH: {"POST": OperatorCommand(MemoryFields, self._resume, _OF_ALL)},
            PROFILE_PATH: {"POST": OperatorCommand(ProfileFields, self._profile, _OF_PROFILES)},
            END_PROFILE_PATH: {"POST": OperatorCommand(ModelFields, self._end_profile, _OF_ALL)},
            FLUSH_PATH: {"POST": OperatorCommand(ModelFields, self._flush, _OF_ALL)},
        }

    async def _pause(self, fields: PauseFields) -> Mapping[str, Any]:
        paused = await self._calls.of(fields.model).pause(fields.mode)
        return {"status": "paused", "aborted": paused.aborted}

    async def _continue(self, fields: ModelFields) -> Mapping[str, Any]:
        await self._calls.of(fields.model).resume()
        return {"status": "continued"}

    async def _update(self, fields: UpdateFields) -> Mapping[str, Any]:
        abort = fields.abort_all_requests
        return _updated(
            await self._calls.of(fields.model).update_weights(fields.model_path, abort=abort)
        )

    async def _take(self, fields: PullWeightsFields) -> Mapping[str, Any]:
        abort = fields.abort_all_requests
        return _updated(await self._calls.of(fields.model).take_weights(fields.node, abort=abort))

    async def _release(self, fields: MemoryFields) -> Mapping[str, Any]:
        await self._calls.of(fields.model).release_memory(fields.tags or ())
        return {"status": "released"}

    async def _resume(self, fields: MemoryFields) -> Mapping[str, Any]:
        await self._calls.of(fields.model).resume_memory(fields.tags or ())
        return {"status": "resumed"}

    async def _profile(self, fields: ProfileFields) -> Mapping[str, Any]:
        return _traces(
            "profiling", await self._calls.of(fields.model).start_profile(fields.num_steps or 0)
        )

    async def _end_profile(self, fields: ModelFields) -> Mapping[str, Any]:
        return _traces("written", await self._calls.of(fields.model).stop_profile())

    async def _flush(self, fields: ModelFields) -> Mapping[str, Any]:
        flushed = await self._calls.of(fields.model).flush_caches()
        return {"status": "flushed", "pages_freed": flushed.pages_freed}


def _updated(done: router_pb2.UpdateWeightsResponse) -> Mapping[str, Any]:
    weights = done.id.hex()
    return {"success": True, "message": f"weights {weights}", "weights": weights}


def _traces(status: str, response: router_pb2.ProfilesResponse) -> Mapping[str, Any]:
    profiles = [
        {"role": each.role, "address": each.address, "path": each.path}
        for each in response.profiles
    ]
    return {"status": status, "profiles": profiles}


LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_UNSUPPORTED: dict[str, IgnoredFields] = {"load_inplace": only(False), "lora_int_id": only()}


class LoadFields(ModelFields, kw_only=True):
    lora_name: _Text
    lora_path: _Text


class UnloadFields(ModelFields, kw_only=True):
    lora_name: _Text


class AdaptersEndpoint:
    """HTTP handlers that load and unload LoRA adapters."""

    def __init__(self, calls: ByModel[AdapterCalls]) -> None:
        self._calls = calls

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and HTTP method."""
        return {
            LOAD_PATH: {"POST": OperatorCommand(LoadFields, self._load, _UNSUPPORTED)},
            UNLOAD_PATH: {"POST": OperatorCommand(UnloadFields, self._unload, _UNSUPPORTED)},
        }

    async def _load(self, fields: LoadFields) -> str:
        await self._calls.of(fields.model).load(fields.lora_name, fields.lora_path)
        return f"Success: LoRA adapter '{fields.lora_name}' added successfully."

    async def _unload(self, fields: UnloadFields) -> str:
        await self._calls.of(fields.model).unload(fields.lora_name)
        return f"Success: LoRA adapter '{fields.lora_name}' removed successfully."

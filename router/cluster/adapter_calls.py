"""Loading and unloading of LoRA adapters on all nodes, by call of an operator."""

from collections.abc import Sequence

from common.config import check_adapter_name
from common.errors import InvalidRequest, NotFound
from protos import router_pb2
from router.cluster.cluster import Cluster
from router.cluster.cluster_state import ClusterState
from router.cluster.fan_out import BroadcastResult, NodeMember, ask_all

_LOAD_S = 65.0  # longer than a node takes
_UNLOAD_S = 10.0
_TOLD_S = 5.0  # longest wait until the router's streams report the change


class AdapterCalls:
    """Adapter calls. For one event loop.

    Args:
        served: name of the served model.
    """

    def __init__(self, state: ClusterState, cluster: Cluster, served: str) -> None:
        self._state = state
        self._cluster = cluster
        self._served = served

    async def load(self, name: str, path: str) -> router_pb2.LoadAdapterResponse:
        """Load an adapter on all nodes. If this raises, only nodes that had it before have it.

        Raises:
            InvalidRequest: a node refuses it or does not answer, or nodes have read different
                adapters.
        """
        self._check(name)
        request = router_pb2.LoadAdapterRequest(name=name, path=path)
        said = await ask_all(self._state.members, "LoadAdapter", request, _LOAD_S)
        if not said:
            raise InvalidRequest("lora_name: there is no node to load it")
        problems = [each.problem for each in said if each.problem]
        loaded = [each for each in said if not each.problem]
        if len({each.answer.id for each in loaded}) > 1:
            problems.append("nodes have read different adapters there")
        if problems:
            fresh = [each.member for each in loaded if each.answer.fresh]
            await self._unload(fresh, name)
            raise InvalidRequest(f"lora_path: {'; '.join(problems)}")
        answer: router_pb2.LoadAdapterResponse = loaded[0].answer
        await self._cluster.adapters.until(name, answer.id, _TOLD_S)
        return answer

    async def unload(self, name: str) -> router_pb2.UnloadAdapterResponse:
        """Unload an adapter. Running requests that use it continue, and new ones cannot use it.

        Raises:
            NotFound: no node has it.
            InvalidRequest: a node does not answer.
        """
        self._check(name)
        said = await self._unload(self._state.members, name)
        problems = [each.problem for each in said if each.problem]
        if problems:
            raise InvalidRequest(f"lora_name: {'; '.join(problems)}")
        if not any(each.answer.known for each in said):
            raise NotFound(f"lora_name: no adapter {name!r} is loaded")
        await self._cluster.adapters.until(name, None, _TOLD_S)
        return router_pb2.UnloadAdapterResponse(known=True)

    async def _unload(self, members: Sequence[NodeMember], name: str) -> list[BroadcastResult]:
        request = router_pb2.UnloadAdapterRequest(name=name)
        return await ask_all(members, "UnloadAdapter", request, _UNLOAD_S)

    def _check(self, name: str) -> None:
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise InvalidRequest(f"lora_name: {error}") from None
        if name == self._served:
            raise InvalidRequest(f"lora_name: the model itself is called {name!r}")

"""Roles that may call each method of a node. Methods that are not listed may not be called.

The router's own methods are for clients, which have API keys and no roles.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["router", "node", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
CALLEE: Role = "node"  # role of the callee of all these methods

_OPERATOR: frozenset[Role] = frozenset({"operator"})
_ROUTER_TOO: frozenset[Role] = frozenset({"router", "operator"})

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "/baton.v1.DecodeNode/Serve": frozenset({"router"}),
    "/baton.v1.KvTransfer/Pair": frozenset({"node"}),
    "/baton.v1.Pooling/Pool": frozenset({"router"}),
    "/baton.v1.Node/Describe": _ROUTER_TOO,
    "/baton.v1.Node/WatchCache": _ROUTER_TOO,
    "/baton.v1.Node/Explain": _ROUTER_TOO,
    "/baton.v1.Node/LoadAdapter": _ROUTER_TOO,
    "/baton.v1.Node/UnloadAdapter": _ROUTER_TOO,
    "/baton.v1.Node/Drain": _OPERATOR,
    "/baton.v1.Node/Switch": _OPERATOR,
    "/baton.v1.Node/Pause": _ROUTER_TOO,
    "/baton.v1.Node/Continue": _ROUTER_TOO,
    "/baton.v1.Node/ReleaseMemory": _ROUTER_TOO,
    "/baton.v1.Node/ResumeMemory": _ROUTER_TOO,
    "/baton.v1.Node/StartProfile": _ROUTER_TOO,
    "/baton.v1.Node/StopProfile": _ROUTER_TOO,
    "/baton.v1.Node/FlushCache": _ROUTER_TOO,
    "/baton.v1.Node/PrepareWeights": _ROUTER_TOO,
    "/baton.v1.Node/PutWeights": _ROUTER_TOO,
    "/baton.v1.Node/TakeWeights": _ROUTER_TOO,
    "/baton.v1.Node/Abort": _OPERATOR,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _OPERATOR,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

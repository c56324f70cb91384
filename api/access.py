"""Access rules of a router: the kind of caller that may use each gRPC method and HTTP path.

A method or path without an entry is rejected for every caller. The router does not start if it
serves one.
"""

from collections.abc import Iterable, Mapping

from api.admin import adapters, engines, metrics_endpoint, requests_endpoint
from api.auth.guard import Access


def _all(access: Access, *names: str) -> Mapping[str, Access]:
    return dict.fromkeys(names, access)


_ROUTER = "/baton.v1.Router/"
METHODS: Mapping[str, Access] = {
    **_all(
        "client",
        *(f"{_ROUTER}{name}" for name in ("Generate", "Embed", "Score", "ScoreTokens")),
        *(f"{_ROUTER}{name}" for name in ("Tokenize", "Detokenize", "GetModel")),
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ),
    **_all("operator", *(f"{_ROUTER}{name}" for name in ("GetCluster", "Explain"))),
    **_all(
        "commander",
        *(f"{_ROUTER}{name}" for name in ("Drain", "Move", "TellPlan")),
        *(f"{_ROUTER}{name}" for name in ("LoadAdapter", "UnloadAdapter")),
        *(f"{_ROUTER}{name}" for name in ("Pause", "Continue", "UpdateWeights", "FlushCache")),
        *(f"{_ROUTER}{name}" for name in ("ReleaseMemory", "ResumeMemory")),
        *(f"{_ROUTER}{name}" for name in ("StartProfile", "StopProfile")),
    ),
}

PATHS: Mapping[str, Access] = {
    **_all("anybody", "/", "/health", "/ready"),
    **_all(
        "client",
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank"),
        *("/v1/models", "/version", "/openapi.json"),
        *("/get_model_info", "/model_info", "/get_server_info", "/server_info"),
    ),
    **_all("operator", "/cluster", requests_endpoint.PATH, metrics_endpoint.PATH),
    **_all("commander", adapters.LOAD_PATH, adapters.UNLOAD_PATH, *engines.COMMANDS),
}
# Every path that begins with one of these prefixes and has no entry above.
PATHS_BELOW: Mapping[str, Access] = {
    "/page/": "anybody",
    "/v1/models/": "client",
    f"{requests_endpoint.PATH}/": "operator",
}


def of_path(path: str) -> Access | None:
    """Return the access rule of a path, or None if it has no entry."""
    below = (access for start, access in PATHS_BELOW.items() if path.startswith(start))
    return PATHS.get(path) or next(below, None)


def check_paths(served: Iterable[str]) -> None:
    """Raise KeyError for a path without an entry."""
    for path in served:
        if of_path(path) is None:
            raise KeyError(path)

"""Construction of the router's HTTP port: checks, routes and limits."""

from collections.abc import Callable, Mapping

from api import paths as api
from api.access import check_paths
from api.auth.assembly import Clients
from api.dialect import problems
from api.dialect.model_names import ModelNames
from api.http.request import Handler
from api.http.server import HttpServer
from api.http.service import HttpService
from api.http.shared import HttpContext, HttpLimits
from api.http_checks import HttpChecks
from api.page import files as page
from api.pooling.vectors import PoolingService
from api.requests.idempotency import IdempotencyCache
from api.requests.served_model import ServedModel
from common import tls
from common.config import RouterConfig
from router.metrics import RouterMetrics

# Idle HTTP connections and probes. Each live request has one more.
_SPARE_CONNECTIONS = 1024


def make_http(
    config: RouterConfig,
    model: ServedModel,
    names: ModelNames,
    clients: Clients,
    answers: IdempotencyCache,
    vectors: PoolingService,
    counts: RouterMetrics,
    why_not_ready: Callable[[], str | None],
    certificates: tls.Certificates | None,
    commands: Mapping[str, Mapping[str, Handler]],
    others: Mapping[str, Handler],
    others_below: Mapping[str, Handler],
) -> HttpServer:
    """Make the HTTP server.

    Args:
        commands: operator commands, by path and method.
        others: GET handlers beside OpenAI's API and the page, by path.
        others_below: the same for every path that begins with this one.

    Raises:
        KeyError: a path has no access rule.
    """
    checks = HttpChecks(clients.guard, clients.hosts, clients.cors, counts)
    routes = api.routes(
        answers,
        vectors,
        counts,
        checks.begin,
        model=model,
        names=names,
        budget_s=config.request_timeout_s,
        ignore_unknown=config.ignore_unknown_fields,
        why_not_ready=why_not_ready,
        others={
            **page.routes(),
            **commands,
            **{path: {"GET": each} for path, each in others.items()},
        },
        others_below={path: {"GET": each} for path, each in others_below.items()},
    )
    check_paths(routes.paths)
    limits = HttpLimits(
        max_connections=config.max_concurrent_requests + _SPARE_CONNECTIONS,
        max_body_bytes=model.limits.body_bytes,
        unread_s=config.slow_client_timeout_s,
    )
    contexts = None if certificates is None else tls.server_contexts(certificates, "http/1.1")
    shared = HttpContext(limits, problems.error_body, counts)
    return HttpServer(shared, HttpService(shared, routes, checks), contexts)

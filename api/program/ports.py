"""Construction of the ports for clients: the gRPC server and the HTTP server."""

from dataclasses import dataclass

import grpc.aio

from api import paths
from api.access import check_paths
from api.dialect import problems
from api.grpc.admin import AdminService
from api.grpc.inference import InferenceService
from api.grpc.service import CallerResolver, add_router_service
from api.http.server import HttpServer
from api.http.service import HttpService
from api.http.shared import HttpContext, HttpLimits
from api.http_checks import HttpChecks
from api.page import files as page
from api.program.admin import AdminParts
from api.program.base import RouterBase
from api.program.nodes import RouterNodes
from api.program.requests import RequestParts
from api.text.limits import MAX_FIELDS
from common import rpc, tls

# Idle HTTP connections and probes. Each live request has one more.
_SPARE_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A gRPC server that is bound to its port and not started.

    Attributes:
        shares_port: whether other processes of this router listen on the same port.
    """

    server: grpc.aio.Server
    health: rpc.Health
    port: int
    shares_port: bool


def make_grpc(
    base: RouterBase, requests: RequestParts, admin: AdminService, *, shares_port: bool
) -> GrpcServer:
    """Make the gRPC server.

    Raises:
        ConfigError: the port is taken.
    """
    config, model, guard = base.config, base.model, base.clients.guard
    callers = CallerResolver(guard)
    server = rpc.make_server(shares_port=shares_port, max_message_bytes=model.limits.message_bytes)
    inference = InferenceService(
        guard, requests.answers, requests.vectors, model, budget_s=config.request_timeout_s
    )
    names = add_router_service(server, inference, admin, callers, max_fields=MAX_FIELDS)
    health = rpc.add_health_and_reflection(server, names, callers)
    port = rpc.bind(
        server, config.server.host, config.server.port, base.certificates, shares_port=shares_port
    )
    return GrpcServer(server, health, port, shares_port)


def make_http(nodes: RouterNodes, requests: RequestParts, admin: AdminParts) -> HttpServer:
    """Make the HTTP server.

    Raises:
        KeyError: a path has no access rule.
    """
    base = nodes.base
    config, clients, metrics = base.config, base.clients, base.metrics
    checks = HttpChecks(clients.guard, clients.hosts, clients.cors, metrics)
    parts = paths.EndpointParts(
        base.model,
        requests.names,
        metrics,
        checks.begin,
        budget_s=config.request_timeout_s,
        ignore_unknown=config.ignore_unknown_fields,
    )
    routes = paths.routes(
        parts,
        requests.answers,
        requests.vectors,
        nodes.why_not_ready,
        others={**page.routes(), **admin.paths},
        others_below=admin.paths_below,
    )
    check_paths(routes.paths)
    limits = HttpLimits(
        max_connections=config.max_concurrent_requests + _SPARE_CONNECTIONS,
        max_body_bytes=base.model.limits.body_bytes,
        unread_s=config.slow_client_timeout_s,
    )
    contexts = (
        None if base.certificates is None else tls.server_contexts(base.certificates, "http/1.1")
    )
    shared = HttpContext(limits, problems.error_body, metrics)
    return HttpServer(shared, HttpService(shared, routes, checks), contexts)

"""Construction of the parts of a router that know no nodes: its model, identity and clients."""

import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import grpc.aio

from api.auth.assembly import Clients, make_clients
from api.requests.limiter import RequestLimiter
from api.requests.served_model import ServedModel, served_model
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.identity import program
from common.identity.program import identity_of
from common.metrics.program import TrustMetrics
from common.tracing import context
from router.metrics import RouterMetrics
from router.timelines import TimelineRecorder


@dataclass(frozen=True, slots=True)
class RouterBase:
    """The parts of a router that know no nodes.

    Attributes:
        certificates: of the ports for clients. None: no TLS.
        make_channel: opens a channel to the node at an address.
    """

    config: RouterConfig
    model: ServedModel
    metrics: RouterMetrics
    timelines: TimelineRecorder
    clients: Clients
    admission: RequestLimiter
    certificates: tls.Certificates | None
    make_channel: Callable[[str], grpc.aio.Channel]


def make_base(config: RouterConfig, files: ModelFiles, resources: ExitStack) -> RouterBase:
    """Make these parts.

    Args:
        resources: closes them.
    Raises:
        ConfigError: the tokenizer, chat template, secret, keys or certificates cannot be used.
    """
    metrics = RouterMetrics()
    model = served_model(
        files,
        config.reasoning_parser,
        config.tool_parser,
        config.images,
        config.tool_arguments,
    )
    resources.callback(model.prompts.close)
    certificates = tls.certificates(config.server.tls, "--server.tls")
    for_nodes = tls.certificates(config.tls_to_nodes, "--node-tls")
    _report_expiry(metrics.trust, certificates, for_nodes)
    name = f"router-{secrets.token_hex(4)}@{socket.gethostname()}"  # in the logs of nodes
    identity = identity_of("router", name, config.server.secret_file, metrics.trust.refused)
    asked = identity is not None or config.server.tls.mutual or config.tls_to_nodes.mutual
    program.check_exposure(config.server.host, asked=asked, insecure=config.server.insecure)
    clients = make_clients(config, metrics)
    admission = RequestLimiter(
        config.max_concurrent_requests, longest_wait_s=config.clients.max_queue_wait_s
    )
    metrics.waiting_from(lambda: admission.num_waiting)
    tracer = context.start(config.server, "baton-router", ratio=config.trace_sample_ratio)
    if tracer is not None:
        resources.callback(tracer.close)
    return RouterBase(
        config,
        model,
        metrics,
        TimelineRecorder(metrics, tracer),
        clients,
        admission,
        certificates,
        partial(rpc.make_channel, certificates=for_nodes, identity=identity),
    )


def _report_expiry(
    trust: TrustMetrics, shown: tls.Certificates | None, to_nodes: tls.Certificates | None
) -> None:
    """Export the expiry of certificates as metrics."""
    if shown is not None:
        trust.certificate_ends("shown", partial(tls.shown_end, shown))
        trust.certificate_ends("authority", partial(tls.authority_end, shown))
    if to_nodes is not None:
        trust.certificate_ends("shown_to_nodes", partial(tls.shown_end, to_nodes))
        trust.certificate_ends("authority_of_nodes", partial(tls.authority_end, to_nodes))

"""Client channels."""

import asyncio

import grpc.aio

from common import tls
from common.identity.identity import Identity
from common.identity.signing_channel import SigningChannel
from common.rpc.options import CHANNEL_OPTIONS
from common.tls.channel import TlsGrpcChannel


def make_channel(
    address: str,
    certificates: tls.Certificates | None = None,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """Return a channel with a separate connection to host:port. The caller closes it.

    Args:
        address: host:port.
        certificates: used for TLS if they include a `ca`, which verifies the other side.
        identity: shown to nodes, which must prove theirs.
    """
    channel: grpc.aio.Channel
    if certificates is None or certificates.config.ca is None:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = TlsGrpcChannel(address, certificates, CHANNEL_OPTIONS)
    return channel if identity is None else SigningChannel(channel, identity)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task is being cancelled.

    For loops that catch AioRpcError: if a call fails at the moment of a cancellation, grpcio raises
    only the failure, and the cancellation would be lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

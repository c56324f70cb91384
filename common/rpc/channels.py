"""How a server is called."""

import asyncio

import grpc.aio

from common import tls
from common.identity.identity import Identity
from common.identity.signing_channel import SigningChannel
from common.rpc.options import CHANNEL_OPTIONS
from common.tls.channel import TlsChannel


def make_channel(
    address: str,
    certificates: tls.Certificates | None = None,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """A channel of its own connection to host:port. The caller closes it.

    Args:
        certificates: over TLS if there is a `ca` among them, which the other side is checked by.
        identity: shown to nodes, which must prove theirs.
    """
    channel: grpc.aio.Channel
    if certificates is None or certificates.config.ca is None:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = TlsChannel(address, certificates, CHANNEL_OPTIONS)
    return channel if identity is None else SigningChannel(channel, identity)


def raise_if_cancelled() -> None:
    """For loops that catch AioRpcError: when a call fails in the moment in which its task is
    cancelled, grpcio raises the failure alone, and the cancel would be lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

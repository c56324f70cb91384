"""Replacement of gRPC's own connections. A simulation connects its processes in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import grpc.aio


class Network(Protocol):
    """Channels and servers that behave like those of grpc.aio, without TLS."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to host:port."""

    def server(self) -> grpc.aio.Server:
        """Return a server that is not bound yet."""


_used: ContextVar[Network | None] = ContextVar("network", default=None)


def current() -> Network | None:
    """Return the network that is used here, or None for gRPC's own."""
    return _used.get()


@contextmanager
def use(network: Network) -> Iterator[None]:
    """Use a network inside the context, and in all tasks that begin there."""
    token = _used.set(network)
    try:
        yield
    finally:
        _used.reset(token)

"""A gRPC channel whose certificates can change. gRPC's own channel keeps its first certificates.

Calls use an inner channel until there are newer certificates. Then the next call creates a new one,
and the old one stays open until its calls end. Open connections are not closed for this.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from common import tls
from common.tls.calling_channel import CallingChannel


class TlsGrpcChannel(CallingChannel):
    def __init__(
        self, address: str, certificates: tls.Certificates, options: Sequence[tuple[str, Any]]
    ) -> None:
        """Create the channel.

        Args:
            address: host:port.
            certificates: with a `ca`, which verifies the other side.
            options: as for gRPC's channels.
        """
        self._address = address
        self._certificates = certificates
        self._options = list(options)
        if certificates.config.server_name:
            name = certificates.config.server_name
            self._options.append(("grpc.ssl_target_name_override", name))
        self._used = certificates.current()
        self._inner = self._make()
        self._num_calls: dict[grpc.aio.Channel, int] = {self._inner: 0}  # includes old channels
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self, grace: float | None = None) -> None:
        """Close the channel like gRPC's: calls have `grace` seconds, or are ended at once."""
        await asyncio.gather(*(each.close(grace) for each in list(self._num_calls)))
        await asyncio.gather(*self._closing)

    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            inner = self.current()
            made = getattr(inner, kind)(*method, **how)(*arguments, **settings)
            self._num_calls[inner] += 1
            made.add_done_callback(lambda _: self._done(inner))
            return made

        return call

    def _done(self, inner: grpc.aio.Channel) -> None:
        self._num_calls[inner] -= 1
        self._see_off(inner)

    def current(self) -> grpc.aio.Channel:
        pems = self._certificates.current()
        if pems is not self._used:
            old, self._used = self._inner, pems
            self._inner = self._make()
            self._num_calls[self._inner] = 0
            self._see_off(old)
        return self._inner

    def _see_off(self, inner: grpc.aio.Channel) -> None:
        """Close an old inner channel that has no calls."""
        if inner is not self._inner and not self._num_calls[inner]:
            del self._num_calls[inner]
            closing = asyncio.ensure_future(inner.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _make(self) -> grpc.aio.Channel:
        credentials = tls.channel_credentials(self._used)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)

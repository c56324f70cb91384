"""Base class of gRPC channels that wrap one or several channels and change each call.

This class handles how callers use a channel. Subclasses choose the channel and change the calls.
"""

from abc import abstractmethod
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio


class CallingChannel(grpc.aio.Channel):
    """A wrapping channel. For one event loop. The caller closes it."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """Return the channel that a call would use now."""

    @abstractmethod
    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """Return the callable for one method.

        Args:
            kind: "unary_unary" or another kind of call.
            method: positional arguments of the channel's method of that kind.
            how: its keyword arguments.
        """

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return self.calling("unary_unary", method, how)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return self.calling("unary_stream", method, how)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return self.calling("stream_unary", method, how)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return self.calling("stream_stream", method, how)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

"""A gRPC channel whose calls carry a token and require the callee's proof.

Calls of methods without a rule in roles.py are not changed. If the callee sends no valid proof, the
call fails with UNAUTHENTICATED, like a failed connection: no response is read, and nothing is sent
on a stream.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import grpc
import grpc.aio

from common.identity.by_token import BEARER, PROOF, SHOWN
from common.identity.identity import Identity
from common.identity.refusals import AuthRejection
from common.identity.roles import MAY_CALL
from common.identity.tokens import Token
from common.tls.calling_channel import CallingChannel


class SigningChannel(CallingChannel):
    def __init__(self, inner: grpc.aio.Channel, identity: Identity) -> None:
        """Wrap a channel.

        Args:
            inner: owned by this object from now on.
            identity: signs the calls.
        """
        self._inner = inner
        self._identity = identity

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def current(self) -> grpc.aio.Channel:
        return self._inner

    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        made = getattr(self._inner, kind)(*method, **how)
        name = method[0]
        if name not in MAY_CALL:
            return made
        proved = _ProvedUnary if kind.endswith("unary") else _ProvedStream

        def call(*arguments: Any, metadata: Any = (), **settings: Any) -> Any:
            token = self._identity.token(name)
            shown = (*(metadata or ()), (SHOWN, BEARER + token.text))
            return proved(made(*arguments, metadata=shown, **settings), self._checking(token))

        return call

    def _checking(self, token: Token) -> Callable[[Any], Awaitable[None]]:
        """Return the check of the proof for the call of `token`."""

        async def check(call: Any) -> None:
            proof = (await call.initial_metadata()).get(PROOF)
            try:
                if proof is None:
                    raise AuthRejection("missing", "it has sent no proof")
                self._identity.check_proof(token, proof)
            except AuthRejection as refused:
                self._identity.count("callee", refused.reason)
                call.cancel()
                raise _unproved(refused) from refused

        return check


class _Proved:
    """A call whose proof is checked before its response is used."""

    def __init__(self, call: Any, check: Callable[[Any], Awaitable[None]]) -> None:
        self._call = call
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class _ProvedUnary(_Proved):
    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self._call
        await self._check(self._call)
        return answer


class _ProvedStream(_Proved):
    def __init__(self, call: Any, check: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__(call, check)
        self._proving: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        await self._proved()
        await self._call.write(message)

    async def read(self) -> Any:
        await self._proved()
        return await self._call.read()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._proved()
        async for message in self._call:
            yield message

    async def _proved(self) -> None:
        """Check the proof once. All concurrent callers get the same result."""
        if self._proving is None:
            self._proving = asyncio.ensure_future(self._prove())
            self._proving.add_done_callback(_seen)
        await asyncio.shield(self._proving)

    async def _prove(self) -> None:
        metadata = await self._call.initial_metadata()
        if PROOF not in metadata and self._call.done():
            await self._call.read()  # raises the error that ended the call, if there is one
        await self._check(self._call)


def _seen(proving: "asyncio.Task[None]") -> None:
    """Mark the exception as retrieved, in case no caller waits any more."""
    if not proving.cancelled():
        proving.exception()


def _unproved(refused: AuthRejection) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAUTHENTICATED,
        nothing,
        nothing,
        details=f"what answers there has not proved that it is a node of this cluster: {refused}",
    )

"""Server at this process's socket that answers the other processes of this router."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from common.errors import ConfigError
from router.workers.asking import Tell
from router.workers.place import ProcessSlot


@asynccontextmanager
async def told(place: ProcessSlot, tells: Mapping[str, Tell]) -> AsyncIterator[None]:
    """Answer calls while inside the context. Does nothing in a router with one process.

    Args:
        tells: handlers by path.
    Raises:
        ConfigError: it cannot listen at the socket.
    """
    if not place.is_shared:
        yield
        return
    app = web.Application()
    for path, tell in tells.items():
        app.router.add_get(path, _handler(tell))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        try:
            await web.UnixSite(runner, place.socket).start()
        except OSError as error:
            raise ConfigError(
                f"--processes: no socket for the router's processes at {place.socket}: {error}; "
                "TMPDIR can name another directory"
            ) from error
        yield
    finally:
        await runner.cleanup()


def _handler(tell: Tell) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await tell(request.query))

    return answer

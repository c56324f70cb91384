"""The HTTP port of a router, for lists that its gRPC service does not have."""

import argparse
import json
import os
import ssl
from typing import Any

import aiohttp

from cli import client
from cli.client import UnfinishedRestart
from cli.local import plan
from common import tls

_ANSWER_S = 10.0
_FLAG = "--url"


def add_url_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _FLAG,
        default=f"http://{plan.HOST}:{plan.HTTP_PORT}",
        metavar="URL",
        help="HTTP port of the router (%(default)s)",
    )


async def get(
    url: str,
    path: str,
    metadata: client.Metadata,
    certificates: tls.Certificates | None,
    key_source: str,
) -> Any:
    """Return the JSON of a path. Raises UnfinishedRestart if the router does not send any."""
    config = None if certificates is None else certificates.config
    context = ssl.create_default_context(cafile=config.ca if config else None)
    if config and config.cert:
        context.load_cert_chain(config.cert, config.key)
    name = config.server_name if config else None
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=dict(metadata)) as session:
            async with session.get(
                url.rstrip("/") + path, ssl=context, server_hostname=name, allow_redirects=False
            ) as response:
                text = await response.text()
    except aiohttp.InvalidURL:
        sentence = f"{_FLAG}: {url!r} is invalid, expected http(s)://HOST:PORT"
        raise UnfinishedRestart(sentence) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        number = getattr(error, "errno", None) or 0  # negative: of the resolver
        reason = os.strerror(number) if number > 0 else str(error) or "timed out"
        raise UnfinishedRestart(client.unreachable(url, reason, _FLAG)) from None
    if response.status != 200:
        source = f" ({key_source})" if response.status == 401 else ""
        raise UnfinishedRestart(f"{url}: {response.status}: {_message(text)}{source}")
    try:
        return json.loads(text)
    except ValueError:
        raise UnfinishedRestart(f"{url}{path} is not JSON: {_FLAG} must name a router") from None


def _message(text: str) -> str:
    """Return the message of an error body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]

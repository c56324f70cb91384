"""Complete HTTP requests of a client with a key. The responses are read and ignored."""

import json
from typing import Any

from tests.attack.connections import connected
from tests.attack.target import Target

# Of one request. The router of a siege accepts 64 concurrent requests, so it rejects 128 choices
# after it has read their fields. Any number in between would delay other clients with any fields.
NUM_CHOICES = (1, 6, 128)

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


async def post(target: Target, path: str, body: bytes) -> None:
    """Send a body and read the whole answer."""
    key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    async with connected(target.http) as (reader, writer):
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{key}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        )
        writer.write(body)
        await reader.read()


async def complete(target: Target, **fields: Any) -> None:
    """Request a completion that no end-of-sequence token ends."""
    body = {"prompt": "add 1 2 =", "ignore_eos": True, **fields}
    await post(target, COMPLETIONS, json.dumps(body).encode())

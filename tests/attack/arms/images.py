"""Images: tiny files that claim to be huge, and many of them.

The demo model supports no images, so a request must be rejected before any image is opened.
"""

import base64
import json
from random import Random
from typing import Any

from tests.attack.posts import CHAT, post
from tests.attack.target import Target
from tests.support.models.vision import headed

NUM_WORKERS = 3

_SIDES = {"PNG": 65_535, "JPEG": 65_535, "GIF": 65_535, "WEBP": 16_383}


async def huge(target: Target, draw: Random) -> None:
    """Send a small file that claims as many pixels as its format allows."""
    await _show(target, [_huge(draw)])


async def many(target: Target, draw: Random) -> None:
    await _show(target, [_huge(draw) for _ in range(draw.choice((8, 9, 3000)))])


async def large(target: Target, draw: Random) -> None:
    """Send a file of megabytes that is no image."""
    await _show(target, [draw.randbytes(1000) * draw.choice((1000, 6000))])


async def addresses(target: Target, draw: Random) -> None:
    urls = ["http://127.0.0.1:1/", "http://2130706433/", "file:///etc/passwd", "x" * 100_000]
    await _send(target, draw.choices(urls, k=draw.choice((1, 8, 100))))


def _huge(draw: Random) -> bytes:
    kind = draw.choice(list(_SIDES))
    return headed(kind, _SIDES[kind], _SIDES[kind])


async def _show(target: Target, files: list[bytes]) -> None:
    await _send(target, ["data:image/any;base64," + base64.b64encode(f).decode() for f in files])


async def _send(target: Target, urls: list[str]) -> None:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    await post(target, CHAT, json.dumps(body).encode())

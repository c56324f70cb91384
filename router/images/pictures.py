"""The images of one request, from their addresses to the pixels that nodes get.

Refused by size before work: by number before one is read, by bytes before one is opened, by pixels
and tokens before one is decoded.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from common.config import ImagesConfig
from common.errors import InvalidRequest
from common.requests.images import Image
from common.serve_protocol import MAX_PIXEL_BYTES
from common.vision_files import VisionFiles
from router.images.fetching import Fetch, HttpFetch, no_fetch
from router.images.picture import Picture
from router.images.sizes import tokens_of

MAX_ENCODED_BYTES = 8 << 20  # of one request's images; as base64 they fit into its body
_TOO_LARGE = f"images: more than the {MAX_ENCODED_BYTES} bytes allowed"
LOW_DETAIL_TOKENS = 256
_THREADS = 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sized:
    encoded: bytes
    rows: int
    columns: int


class Pictures:
    """For one event loop."""

    def __init__(self, files: VisionFiles, config: ImagesConfig) -> None:
        # Imported here: models of texts have no use for Pillow.
        from router.images.pixels import pixels_of, size_of

        self._size_of, self._pixels_of = size_of, pixels_of
        self._files = files
        self._config = config
        self._fetch: Fetch = HttpFetch(config.fetch_s) if config.fetch else no_fetch
        # So many are decoded at once, whatever comes.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")

    async def read(self, pictures: Sequence[Picture], max_tokens: int) -> list[Image]:
        """The same images, which have no places in a prompt yet.

        Args:
            max_tokens: that they may have together.
        Raises:
            InvalidRequest: one cannot be had, or is none, or all together are too much.
        """
        allowed = self._config.max_images
        if len(pictures) > allowed:
            raise InvalidRequest(f"messages has {len(pictures)} images, {allowed} allowed")
        left = MAX_ENCODED_BYTES
        sized: list[_Sized] = []
        for picture in pictures:
            encoded = await self._encoded(picture, left)
            left -= len(encoded)
            sized.append(await self._run(partial(self._measured, picture, encoded)))
        self._check(sized, max_tokens)
        return [await self._run(partial(self._decoded, one)) for one in sized]

    def placed(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], list[Image]]:
        """A prompt with the tokens of its images, each in its place.

        Args:
            token_ids: with one token of the model's in the place of each.
        Raises:
            InvalidRequest: there are other placeholders than for them.
        """
        placeholder = self._files.placeholder
        found = token_ids.count(placeholder)
        if found != len(images):
            raise InvalidRequest(
                f"messages: the prompt has {found} places for {len(images)} images; a text may not "
                "have the model's own mark of one"
            )
        whole: list[int] = []
        placed: list[Image] = []
        after = 0
        for image in images:
            at = token_ids.index(placeholder, after)
            whole += token_ids[after:at]
            placed.append(msgspec.structs.replace(image, at=len(whole)))
            whole += image.token_ids
            after = at + 1
        return [*whole, *token_ids[after:]], placed

    async def _encoded(self, picture: Picture, left: int) -> bytes:
        source = picture.source
        if isinstance(source, bytes):
            if len(source) > left:
                raise InvalidRequest(_TOO_LARGE)
            return source
        if not source.startswith("data:"):
            return await self._fetch(source, left)
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest("an image is data:image/...;base64,... or an address")
        if len(body) > 4 * (left // 3 + 1):
            raise InvalidRequest(_TOO_LARGE)
        try:
            return await self._run(partial(base64.b64decode, body, validate=True))
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"an image is no base64: {error}") from error

    def _measured(self, picture: Picture, encoded: bytes) -> _Sized:
        most = self._config.max_tokens
        if picture.low_detail:
            most = min(most, LOW_DETAIL_TOKENS)
        return _Sized(encoded, *tokens_of(*self._size_of(encoded), self._files, most))

    def _check(self, sized: Sequence[_Sized], max_tokens: int) -> None:
        num_tokens = sum(one.rows * one.columns for one in sized)
        most = min(max_tokens, MAX_PIXEL_BYTES // (3 * self._files.token_side**2))
        if num_tokens > most:
            raise InvalidRequest(
                f"messages: its images have {num_tokens} tokens, {most} are left for them; smaller "
                "ones, or detail low, have fewer"
            )

    def _decoded(self, one: _Sized) -> Image:
        side = self._files.token_side
        lies, pixels = self._pixels_of(one.encoded, one.rows * side, one.columns * side)
        rows, columns = (one.columns, one.rows) if lies else (one.rows, one.columns)
        return Image(0, rows, columns, pixels)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

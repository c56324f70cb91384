"""The images of one request, from their URLs to the pixels that nodes receive.

Images are rejected by size before any work: by number before one is fetched, by bytes before one is
opened, and by pixels and tokens before one is decoded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from api.auth.client import Client
from api.images.decoding import Decoding
from api.images.fetching import HttpFetch, ImageFetch, no_fetch
from api.images.jobs import ImageJob
from api.images.picture import ImageInput
from common.config import ImagesConfig
from common.errors import InvalidRequest
from common.limits import MAX_PIXEL_BYTES
from common.requests.images import Image
from common.vision_files import VisionFiles

MAX_ENCODED_BYTES = 8 << 20  # of all images of one request. As base64 they fit into its body
_TOO_LARGE = f"images: more than the {MAX_ENCODED_BYTES} bytes allowed"
LOW_DETAIL_TOKENS = 256


class _Content(NamedTuple):
    """An image's file, or base64 of it."""

    given: bytes | str
    num_bytes: int  # of the file, at most


class ImageLoader:
    """Reader of images. For one event loop."""

    def __init__(self, files: VisionFiles, config: ImagesConfig) -> None:
        self._files = files
        self._config = config
        self._fetch: ImageFetch = (
            HttpFetch(config.fetch_timeout_s) if config.allow_urls else no_fetch
        )
        self.decoding = Decoding()

    def close(self) -> None:
        self.decoding.close()

    async def read(
        self, pictures: Sequence[ImageInput], max_tokens: int, client: Client
    ) -> list[Image]:
        """Return the images, without their positions in a prompt.

        Args:
            max_tokens: limit of all images together.
            client: the client whose decoding turns are used.

        Raises:
            InvalidRequest: one cannot be fetched or is invalid, or all together are too large.
            Overloaded, NodeUnavailable: see Decoding.decoded.
        """
        allowed = self._config.max_images
        if len(pictures) > allowed:
            raise InvalidRequest(f"messages has {len(pictures)} images, {allowed} allowed")
        num_bytes = MAX_ENCODED_BYTES
        contents: list[_Content] = []
        for picture in pictures:
            contents.append(await self._content(picture, num_bytes))
            num_bytes -= contents[-1].num_bytes
        left = min(max_tokens, MAX_PIXEL_BYTES // (3 * self._files.token_side**2))
        images: list[Image] = []
        for picture, content in zip(pictures, contents, strict=True):
            job = self._job(picture, content, left)
            one = await self.decoding.decoded(job, client)
            images.append(Image(0, one.rows, one.columns, one.pixels))
            left -= images[-1].num_tokens
        return images

    def placed(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], list[Image]]:
        """Return a prompt with the tokens of its images, and the images with their positions.

        Args:
            token_ids: the prompt with one placeholder token for each image.

        Raises:
            InvalidRequest: the number of placeholders differs from the number of images.
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

    async def _content(self, picture: ImageInput, left: int) -> _Content:
        source = picture.source
        if isinstance(source, bytes):
            if len(source) > left:
                raise InvalidRequest(_TOO_LARGE)
            return _Content(source, len(source))
        if not source.startswith("data:"):
            fetched = await self._fetch(source, left)
            return _Content(fetched, len(fetched))
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest("an image is data:image/...;base64,... or an address")
        if len(body) > 4 * (left // 3 + 1):
            raise InvalidRequest(_TOO_LARGE)
        if not body.isascii():
            raise InvalidRequest("an image is not valid base64: it has other characters than ASCII")
        return _Content(body, min(left, 3 * len(body) // 4))

    def _job(self, picture: ImageInput, content: _Content, left: int) -> ImageJob:
        most = self._config.max_tokens_per_image
        if picture.low_detail:
            most = min(most, LOW_DETAIL_TOKENS)
        given = content.given
        is_base64 = isinstance(given, str)
        file = given.encode() if isinstance(given, str) else given
        return ImageJob(file, is_base64, self._files, most, left)

"""The images and videos of one request, from their URLs to the pixels that nodes receive.

Limits are checked before the work that they limit: the number of images before one is fetched,
bytes before one is opened, and pixels and tokens before one is decoded.
"""

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver
from yarl import URL

from api.auth.client import Client
from api.auth.fair_slots import FairShareLimiter
from api.images.picture import (
    Decoded,
    ImageInput,
    ImageJob,
    MediaInput,
    Outcome,
    Refused,
    VideoInput,
)
from api.images.videos import MAX_FPS, MIN_FPS, num_patches, patches_of
from common.config import ImagesConfig
from common.errors import ConfigError, InvalidRequest, NodeUnavailable, check_at_most
from common.limits import MAX_IMAGES, MAX_PIXEL_BYTES
from common.logs import kv
from common.model_directory import VisionFiles
from common.process.helper import ANSWERED, Helper, HelperLost, Question
from common.requests.images import Image

log = logging.getLogger(__name__)

LANES = 2  # concurrent decodings
MAX_WAITING = 64  # images that wait for decoding
MAX_BYTES = 448 << 20  # bytes of memory to decode one image, see MAX_PIXELS
CPU_S = 5  # CPU seconds to decode one image
_LONGEST_WAIT_S = 30.0  # seconds in the queue
_DEADLINE_S = 60.0  # seconds to decode on a machine that is busy with other work


class Decoding:
    """Decodes images in a helper process, started with the first image. For one event loop."""

    def __init__(self) -> None:
        self.helper = Helper("api.images.decoder", [], num_lanes=LANES, deadline_s=_DEADLINE_S)
        self._slots = FairShareLimiter(
            LANES,
            longest_wait_s=_LONGEST_WAIT_S,
            max_waiting=MAX_WAITING,
            what="images are being decoded",
        )
        self._lanes = list(range(LANES))  # free lanes
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="images")

    async def decoded(self, job: ImageJob, client: Client) -> Decoded:
        """Return the image of a job.

        Raises:
            InvalidRequest: it is not an image, or is too large.
            Overloaded: the queue is full, or the job waited too long.
            NodeUnavailable: the helper process has failed.
        """
        await self._slots.acquire(client)
        # The client keeps its slot until the decoding ends, even if the request is cancelled.
        decoding = asyncio.ensure_future(self._decode_in_slot(job, client))
        decoding.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(decoding)

    def close(self) -> None:
        self.helper.close()
        self._threads.shutdown(wait=False)

    async def _decode_in_slot(self, job: ImageJob, client: Client) -> Decoded:
        lane = self._lanes.pop()
        try:
            run = asyncio.get_running_loop().run_in_executor
            outcome = await run(self._threads, self._ask, lane, job)
        finally:
            self._lanes.append(lane)
            self._slots.release(client)
        match outcome:
            case Refused(sentence):
                raise InvalidRequest(sentence)
            case Decoded():
                return outcome

    def _ask(self, lane: int, job: ImageJob) -> Outcome:
        """Wait for the decoded image on a thread of the executor."""
        question = Question(msgspec.msgpack.encode(job), CPU_S, MAX_BYTES)
        try:
            answer = self.helper.ask(lane, question)
        except HelperLost as error:
            log.warning("image decoder failed %s", kv(reason=repr(error.__cause__)))
            raise NodeUnavailable(
                "images: the image decoder has crashed and is being restarted: send the request "
                "again"
            ) from error
        if answer.took_too_long:
            raise InvalidRequest(f"decoding an image takes more than {CPU_S} s of CPU time")
        if answer.code != ANSWERED:
            raise InvalidRequest(
                f"decoding an image takes more than {MAX_BYTES >> 20} MiB, or it is damaged"
            )
        outcome: Outcome = msgspec.msgpack.decode(answer.content, type=Outcome)
        return outcome


Address = IPv4Address | IPv6Address
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE | re.ASCII)
_BLOCK_BYTES = 64 << 10
# IPv6 networks that map to any IPv4 address: NAT64, 6to4 and Teredo.
_TUNNELS = tuple(
    ipaddress.IPv6Network(each)
    for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)


def is_public(address: Address) -> bool:
    """Return whether an address is global and belongs to one machine."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in tunnel for tunnel in _TUNNELS):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


# The router fetches images only if an operator allows it, and only from public addresses. A name is
# resolved once, and the connection uses a public address of that result, so a DNS server cannot
# switch to an internal address later. Redirects are not followed.
class HttpFetch:
    """Fetches images over HTTP, with a connection for each. For one event loop.

    Args:
        longest_s: time limit in seconds, from the DNS lookup to the last byte.
        allowed: returns whether an address may be used.
    """

    def __init__(
        self,
        longest_s: float,
        allowed: Callable[[Address], bool] = is_public,
        resolver: Callable[[], AbstractResolver] = DefaultResolver,
    ) -> None:
        self._longest_s = longest_s
        self._allowed = allowed
        self._resolver = resolver

    async def __call__(self, url: str, max_bytes: int) -> bytes:
        """Fetch an image. Raise InvalidRequest if it cannot be fetched."""
        target = self._checked(url)
        try:
            async with asyncio.timeout(self._longest_s):
                return await self._fetched(target, max_bytes)
        except TimeoutError:
            raise InvalidRequest(
                f"{_named(target)} took longer than {self._longest_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidRequest(f"{_named(target)} cannot be fetched: {error}") from error

    def _checked(self, url: str) -> URL:
        try:
            target = URL(url)
            host = target.raw_host  # as used for connecting, with fullwidth digits converted
        except ValueError as error:
            raise InvalidRequest(f"the URL of an image is invalid: {error}") from error
        if target.scheme not in ("http", "https") or not host or target.user is not None:
            raise InvalidRequest("the URL of an image must be http://HOST/... or https://HOST/...")
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            if not _is_name(host):
                raise InvalidRequest(
                    f"{_named(target)} is not a valid address: its host is neither a name nor an "
                    "IP address in its usual form"
                ) from None
            return target  # the resolver looks it up
        if not self._allowed(literal):  # checked here, because a literal address is not resolved
            raise InvalidRequest(f"{_named(target)} is not a public address")
        return target

    async def _fetched(self, target: URL, max_bytes: int) -> bytes:
        resolver = _Checked(self._resolver(), self._allowed)
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            async with session.get(target, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise InvalidRequest(
                        f"{_named(target)} responded with {answer.status}, not 200"
                    )
                parts, num_bytes = [], 0
                async for part in answer.content.iter_chunked(_BLOCK_BYTES):
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        raise InvalidRequest(
                            f"{_named(target)} has more than the {max_bytes} bytes allowed"
                        )
        return b"".join(parts)


class _Checked(AbstractResolver):
    """A DNS resolver that keeps only the allowed addresses of another resolver."""

    def __init__(self, resolver: AbstractResolver, allowed: Callable[[Address], bool]) -> None:
        self._resolver = resolver
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        kept = [each for each in found if self._allowed(ipaddress.ip_address(each["host"]))]
        if not kept:
            raise InvalidRequest(f"images: {host} has no public address")
        return kept

    async def close(self) -> None:
        await self._resolver.close()


def _is_name(host: str) -> bool:
    """Return whether a host can only be a name.

    System resolvers read 0x7f.1, 2130706433 and 127.1 as IPv4 addresses, so names that end with a
    number are rejected. No top-level domain is a number.
    """
    last = host.removesuffix(".").rpartition(".")[2]
    return _NAME.fullmatch(host) is not None and not _NUMBER.fullmatch(last)


def _named(target: URL) -> str:
    """Return scheme and host for error messages, without parts that may be secret."""
    return f"images: {target.scheme}://{target.host}"


MAX_ENCODED_BYTES = 8 << 20  # all images of one request. As base64 they fit into its body
_TOO_LARGE = f"images: more than the {MAX_ENCODED_BYTES} bytes allowed"
LOW_DETAIL_TOKENS = 256


class _Content(NamedTuple):
    """An image's file, or base64 of it."""

    given: bytes
    is_base64: bool
    num_bytes: int  # upper bound of the file's size


class _Room(NamedTuple):
    """Remaining limits for the images of a request.

    Attributes:
        squares: token-sized squares of pixels. An image token has one, a video token one per frame.
    """

    tokens: int
    squares: int

    def without(self, images: Sequence[Image]) -> "_Room":
        tokens = sum(image.num_tokens for image in images)
        squares = sum(image.num_tokens * image.frames for image in images)
        return _Room(self.tokens - tokens, self.squares - squares)


class ImageLoader:
    """Fetches and decodes images and videos, and places them in prompts. For one event loop."""

    def __init__(self, files: VisionFiles, config: ImagesConfig) -> None:
        """Raise ConfigError if no image size of the model fits the configured limit of tokens."""
        fixed = files.tokens_per_side**2
        if fixed > config.max_tokens_per_image:
            raise ConfigError(
                f"images.max_tokens_per_image is {config.max_tokens_per_image}, but every image of "
                f"this model has {fixed} tokens"
            )
        self._files = files
        self._config = config
        self._max_squares = MAX_PIXEL_BYTES // (3 * files.token_side**2)
        self._placeholders = {files.placeholder: False}  # True: for videos
        if files.video is not None:
            self._placeholders[files.video.placeholder] = True
        self._fetch = HttpFetch(config.fetch_timeout_s) if config.allow_urls else None
        self.decoding = Decoding()

    def close(self) -> None:
        self.decoding.close()

    def check_numbers(self, media: Sequence[MediaInput]) -> None:
        """Raise InvalidRequest for too many images or videos, or a wrong number of frames."""
        videos = [each for each in media if isinstance(each, VideoInput)]
        if videos and self._files.video is None:
            raise InvalidRequest("messages: this model does not support videos")
        num_images, allowed = len(media) - len(videos), self._config
        check_at_most("messages", num_images, "images", allowed.max_images)
        num_frames = sum(len(video.sources) for video in videos)
        check_at_most("messages", num_frames, "frames of videos", allowed.max_frames)
        for video in videos:
            if len(video.sources) < 2:
                raise InvalidRequest("messages: a video has at least 2 frames: send an image")
            if not MIN_FPS <= video.fps <= MAX_FPS:
                raise InvalidRequest(
                    f"messages: fps is {video.fps:g}, expected {MIN_FPS:g} to {MAX_FPS:g}"
                )
        shown = num_images + sum(num_patches(video, self._files.frames) for video in videos)
        check_at_most("messages", shown, "images and temporal patches of videos", MAX_IMAGES)

    async def read(
        self, media: Sequence[MediaInput], max_tokens: int, client: Client
    ) -> list[Image]:
        """Return images, and temporal patches of videos, without positions in a prompt.

        Args:
            media: accepted by check_numbers.
            max_tokens: limit of all images together.
            client: client whose slots for decoding are used.

        Raises:
            InvalidRequest: one cannot be fetched or is invalid, or all together are too large.
            Overloaded, NodeUnavailable: see Decoding.decoded.
        """
        num_bytes = MAX_ENCODED_BYTES
        contents: list[list[_Content]] = []
        for each in media:
            contents.append([])
            for source in each.sources:
                contents[-1].append(await self._content(source, num_bytes))
                num_bytes -= contents[-1][-1].num_bytes
        room = _Room(max_tokens, self._max_squares)
        images: list[Image] = []
        for each, files in zip(media, contents, strict=True):
            match each:
                case ImageInput():
                    made = [await self._image(each, files[0], room, client)]
                case VideoInput():
                    made = await self._video(each, files, room, client)
            images += made
            room = room.without(made)
        return images

    def placed(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[list[int], list[Image]]:
        """Return the prompt with all tokens of its images, and the images with their positions.

        Args:
            token_ids: the prompt with one placeholder token for each image.

        Raises:
            InvalidRequest: the placeholders do not match the images in number or kind.
        """
        found = [at for at, token in enumerate(token_ids) if token in self._placeholders]
        kinds = [self._placeholders[token_ids[at]] for at in found]
        if kinds != [image.frames > 1 for image in images]:
            raise InvalidRequest(
                f"messages: the prompt has {len(found)} placeholders for {len(images)} images: a "
                "text must not contain the model's placeholder"
            )
        whole: list[int] = []
        placed: list[Image] = []
        after = 0
        for image, at in zip(images, found, strict=True):
            whole += token_ids[after:at]
            placed.append(msgspec.structs.replace(image, at=len(whole)))
            whole += image.token_ids
            after = at + 1
        return [*whole, *token_ids[after:]], placed

    async def _image(
        self, image: ImageInput, content: _Content, room: "_Room", client: Client
    ) -> Image:
        most = self._config.max_tokens_per_image
        if image.low_detail:
            most = min(most, LOW_DETAIL_TOKENS)
        job = ImageJob(content.given, content.is_base64, self._files, most, min(room))
        one = await self.decoding.decoded(job, client)
        return Image(0, one.rows, one.columns, one.pixels)

    async def _video(
        self, video: VideoInput, contents: Sequence[_Content], room: "_Room", client: Client
    ) -> list[Image]:
        """Return the temporal patches.

        Their size depends on the number of frames, not on `room`, so that a video has the same
        tokens in every conversation.
        """
        patches = num_patches(video, self._files.frames)
        frames = patches * self._files.frames
        most = min(self._config.max_tokens_per_image, self._max_squares // frames)
        left = min(room.tokens // patches, room.squares // frames)
        jobs = [
            ImageJob(each.given, each.is_base64, self._files, most, left, len(contents))
            for each in contents
        ]
        decoded = [await self.decoding.decoded(job, client) for job in jobs]
        return list(patches_of(decoded, video.fps, self._files, room.tokens))

    async def _content(self, source: str | bytes, left: int) -> _Content:
        if isinstance(source, bytes):
            if len(source) > left:
                raise InvalidRequest(_TOO_LARGE)
            return _Content(source, False, len(source))
        if not source.startswith("data:"):
            if self._fetch is None:
                raise InvalidRequest(
                    "images: this router does not fetch URLs (--images.allow-urls is off). Send "
                    "data:...;base64"
                )
            fetched = await self._fetch(source, left)
            return _Content(fetched, False, len(fetched))
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(
                "an image must be a URL: data:image/...;base64,... or http(s)://..."
            )
        if len(body) > 4 * (left // 3 + 1):
            raise InvalidRequest(_TOO_LARGE)
        if not body.isascii():
            raise InvalidRequest("an image is not valid base64: it has non-ASCII characters")
        return _Content(body.encode(), True, min(left, 3 * len(body) // 4))

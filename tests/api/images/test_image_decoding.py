"""Images are decoded in a separate process, within limits, and clients take turns."""

import asyncio
import os
import queue
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import cast

import msgspec
import pytest

pytest.importorskip("PIL")

from PIL import Image as Pillow

from api.auth.client import Client, by_address
from api.images import decoder
from api.images.decoder import FORMATS, MAX_PIXELS, Fit
from api.images.picture import Decoded, ImageJob, Outcome, Refused
from api.images.pictures import CPU_S, LANES, MAX_WAITING, Decoding
from common.errors import InvalidRequest, NodeUnavailable, Overloaded
from common.process.helper import ANSWERED, CRASHED, NO_MEMORY, Answer, Helper, Question
from tests.api.images.test_images import drawn, encoded
from tests.support.models.vision import SIDE, files_of, headed, write_vision_files

BUSY, OTHER = by_address("192.0.2.1"), by_address("192.0.2.2")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ImageJob:
    files = files_of(write_vision_files(tmp_path_factory.mktemp("seeing")))
    return ImageJob(encoded(drawn(16, 16)), False, files, 64, 64)


@pytest.fixture
async def decodes() -> AsyncIterator[Decoding]:
    decodes = Decoding()
    yield decodes
    decodes.close()


def of_content(job: ImageJob, content: bytes) -> ImageJob:
    return msgspec.structs.replace(job, content=content)


def worked(job: ImageJob) -> Outcome:
    """Return the program's response, computed in this process."""
    return msgspec.msgpack.decode(decoder.work(msgspec.msgpack.encode(job)), type=Outcome)


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_with_too_many_pixels_for_its_format_is_not_decoded(kind, job, monkeypatch):
    asked: list[tuple[int, int]] = []

    def pixels_of(image: Pillow.Image, fit: Fit, side: int) -> tuple[Fit, bytes]:
        asked.append(image.size)
        return fit, b""

    monkeypatch.setattr(decoder, "pixels_of", pixels_of)
    most = 4096, MAX_PIXELS[kind] // 4096
    assert isinstance(worked(of_content(job, headed(kind, *most))), Decoded)
    assert asked == [most]
    outcome = worked(of_content(job, headed(kind, most[0], most[1] + 1)))
    assert isinstance(outcome, Refused) and f"pixels: {kind} " in outcome.sentence
    assert asked == [most]


def test_an_image_whose_tokens_do_not_fit_is_not_decoded(job, monkeypatch):
    monkeypatch.delattr(decoder, "pixels_of")
    large = of_content(job, encoded(drawn(64, 64)))
    outcome = worked(msgspec.structs.replace(large, tokens_left=63))
    assert outcome == Refused(
        "messages: an image has 64 tokens, 63 are left for it: send fewer or smaller images, or "
        "detail low"
    )


async def test_the_largest_webp_of_34_bytes_is_decoded_within_the_limits(job, decodes):
    content = headed("WEBP", 4096, MAX_PIXELS["WEBP"] // 4096)
    assert len(content) == 34
    decoded = await decodes.decoded(of_content(job, content), BUSY)
    assert len(decoded.pixels) == decoded.rows * decoded.columns * SIDE**2 * 3


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(job):
    """It takes a quarter of the memory of all its pixels."""
    content = encoded(Pillow.new("RGB", (8192, 4096), (200, 30, 60)), "JPEG")
    helper = Helper("api.images.decoder", [], num_lanes=1, deadline_s=120.0)
    try:
        asked = msgspec.msgpack.encode(of_content(job, content))
        answer = helper.ask(0, Question(asked, CPU_S, 32 << 20))
    finally:
        helper.close()
    assert answer.code == ANSWERED
    outcome = msgspec.msgpack.decode(answer.content, type=Outcome)
    assert isinstance(outcome, Decoded) and abs(outcome.pixels[0] - 200) < 4


def test_a_photo_with_embedded_others_is_a_jpeg(job):
    photo = drawn(16, 16)
    content = encoded(photo, "MPO", save_all=True, append_images=[photo])
    assert isinstance(worked(of_content(job, content)), Decoded)


# Decoding process ---------------------------------------------------------------------------------


async def test_the_process_starts_with_the_first_image_and_again_after_its_end(job, decodes):
    assert decodes.helper.pid is None
    first = await decodes.decoded(job, BUSY)
    pid = decodes.helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(NodeUnavailable, match="send the request again"):
        await decodes.decoded(job, BUSY)
    assert await decodes.decoded(job, BUSY) == first


class Held:
    """A decoding process whose requests wait until each is released."""

    def __init__(self, answer: Answer) -> None:
        self.asked: queue.Queue[bytes] = queue.Queue()  # contents
        self.shared = False  # two requests had one lane
        self._answer = answer
        self._lanes: set[int] = set()
        self._ends: dict[bytes, threading.Event] = {}

    def ask(self, lane: int, question: Question) -> Answer:
        content = msgspec.msgpack.decode(question.content, type=ImageJob).content
        end = self._ends[content] = threading.Event()
        self.shared |= lane in self._lanes
        self._lanes.add(lane)
        self.asked.put(content)
        assert end.wait(WAIT_S)
        self._lanes.discard(lane)
        return self._answer

    async def next(self) -> bytes:
        return await asyncio.to_thread(self.asked.get, timeout=WAIT_S)

    def release(self, content: bytes) -> None:
        self._ends[content].set()

    def close(self) -> None:
        for end in self._ends.values():
            end.set()


@pytest.fixture
def held(decodes: Decoding) -> Iterator[Held]:
    held = Held(Answer(ANSWERED, msgspec.msgpack.encode(Decoded(1, 1, b""))))
    decodes.helper = cast(Helper, held)
    yield held
    held.close()


def asks(decodes: Decoding, job: ImageJob, content: bytes, client: Client) -> asyncio.Task[Decoded]:
    return asyncio.create_task(decodes.decoded(of_content(job, content), client))


@pytest.mark.parametrize(
    "code, reason", [(-signal.SIGXCPU, "5 s of CPU time"), (NO_MEMORY, "448 MiB"), (CRASHED, "MiB")]
)
async def test_an_image_over_its_limits_is_an_error_of_the_client(job, decodes, code, reason):
    held = Held(Answer(code))
    decodes.helper = cast(Helper, held)
    asked = asks(decodes, job, b"large", BUSY)
    held.release(await held.next())
    with pytest.raises(InvalidRequest, match=reason):
        await asked


async def test_a_client_with_many_images_delays_another_one_by_one_turn(job, decodes, held):
    many = [asks(decodes, job, b"busy %d" % number, BUSY) for number in range(20)]
    running = [await held.next() for _ in range(LANES)]
    other = asks(decodes, job, b"other", OTHER)
    await asyncio.sleep(0)
    held.release(running[0])
    assert await held.next() == b"other"
    held.release(b"other")
    await other
    for task in many:
        task.cancel()


async def test_the_queue_of_images_is_limited_and_has_room_for_other_clients(job, decodes, held):
    many = [asks(decodes, job, b"%d" % number, BUSY) for number in range(LANES + MAX_WAITING)]
    for _ in range(LANES):
        await held.next()
    refused = [task for task in many if task.done()]
    assert refused and isinstance(refused[0].exception(), Overloaded)
    assert "images are being decoded" in str(refused[0].exception())
    other = asks(decodes, job, b"other", OTHER)
    await asyncio.sleep(0)
    assert not other.done()
    for task in [other, *many]:
        task.cancel()


async def test_a_turn_lasts_until_its_work_ends_even_if_its_request_has_gone(job, decodes, held):
    first, second = (asks(decodes, job, name, BUSY) for name in (b"first", b"second"))
    assert {await held.next(), await held.next()} == {b"first", b"second"}
    first.cancel()
    third = asks(decodes, job, b"third", BUSY)
    held.release(b"second")
    await second
    assert await held.next() == b"third"
    assert not held.shared
    held.release(b"third")
    await third

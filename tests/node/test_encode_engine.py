"""The engine of an encode node: rejected images, and pages in which it publishes embeddings."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from common.config import EncodeConfig, EngineConfig
from common.errors import ConfigError
from common.request import Remaining
from common.requests.images import Image
from encode_node.engine_main import LoadedEncoder
from encode_node.exports import EmbeddingExports
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.models.vision.encoder_thread import EncoderThread
from kvtransfer.messages import Embeddings, HandoffId
from kvtransfer.ports import ClosedEvent, FailCommand, GrantedEvent, OpenedEvent, PublishCommand
from tests.kvtransfer.search.sides.prefix import Posts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.vision import SIDE, make_vision_checkpoint

ID = HandoffId(1, 1, 1)
PIECE = 200  # bytes
PATIENCE_S = 60.0


def config_of(directory: Path, **engine: object) -> EncodeConfig:
    made = EngineConfig(model=str(directory), device="cpu", dtype="float32", **engine)
    return EncodeConfig(engine=made, embedding_bytes=1 << 20)


def picture(colour: int, rows: int = 2, columns: int = 3) -> Image:
    return Image(0, rows, columns, bytes([colour]) * (rows * columns * SIDE**2 * 3))


class Rig:
    def __init__(self, loaded: LoadedEncoder, num_pages: int) -> None:
        self.loaded, self.port, self._news = loaded, Posts(), threading.Event()
        spec, dtype = loaded.opened.loadable.spec, loaded.opened.precision.dtype
        self.pages = PageAllocator(num_pages)
        self.encoder = EncoderThread(loaded.tower, loaded.pool.tensor, spec.image_token_size, dtype)
        self.encoder.notify = self._news.set
        self.exports = EmbeddingExports(
            self.encoder,
            loaded.tower,
            self.pages,
            loaded.pool.tensor,
            self.port,
            weights=loaded.weights,
            token_side=spec.image_token_side,
        )

    def open(self, serial: int, image: Image, num_pieces: int | None = None) -> None:
        num_bytes = image.num_tokens * self.encoder.token_bytes
        source = Embeddings(image, num_pieces or -(-num_bytes // PIECE), PIECE)
        opening = OpenedEvent(serial, ID, self.loaded.weights, Remaining(9.0), source)
        self.exports.opened(opening)
        self.exports.granted(GrantedEvent(serial, 0))

    def next(self) -> PublishCommand | FailCommand:
        deadline = time.monotonic() + PATIENCE_S
        while not (posted := self.port.take()):
            assert time.monotonic() < deadline
            self.exports.poll()
            self._news.wait(0.05)
            self._news.clear()
        (command,) = posted
        assert isinstance(command, PublishCommand | FailCommand)
        return command

    def close(self, serial: int, *, held: bool = True) -> None:
        self.exports.closed(ClosedEvent(serial, ID, held, ""))
        self.exports.poll()

    @property
    def num_published(self) -> int:
        return int(self.pages.holds(PageHolder.PUBLICATION).sum())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedEncoder:
    directory = make_vision_checkpoint(tmp_path_factory.mktemp("model"))
    return LoadedEncoder.load(config_of(directory))


@pytest.fixture
def rig(loaded: LoadedEncoder) -> Iterator[Rig]:
    rig = Rig(loaded, num_pages=10)  # an image of 6 tokens of 256 bytes takes 8
    yield rig
    rig.exports.close()
    rig.encoder.close()


def test_pages_have_the_embeddings_and_are_freed_after_the_read(rig: Rig) -> None:
    image = picture(1)
    rig.open(1, image)
    published = rig.next()
    assert isinstance(published, PublishCommand) and rig.num_published == 8
    kept = rig.loaded.tower.kept(image)
    assert kept is not None
    data = rig.loaded.pool.tensor[torch.from_numpy(published.pages).long(), :PIECE].reshape(-1)
    assert torch.equal(data[: kept.nbytes].view(kept.dtype).view(kept.shape), kept)
    rig.close(1)
    assert rig.num_published == 0 and not rig.exports.busy
    rig.open(2, image)  # which is cached by its content
    assert isinstance(rig.next(), PublishCommand) and rig.exports.num_cached == 1


def test_an_image_waits_for_pages(rig: Rig) -> None:
    rig.open(1, picture(2))
    rig.open(2, picture(3))
    first = rig.next()
    assert isinstance(first, PublishCommand)
    rig.exports.poll()
    assert not rig.port.take()
    rig.close(first.serial)
    second = rig.next()
    assert isinstance(second, PublishCommand) and {first.serial, second.serial} == {1, 2}


@pytest.mark.parametrize(
    "image, num_pieces, reason",
    [
        (picture(4), 7, "pieces"),
        (Image(0, 2, 3, b"rgb"), None, "pixels"),
        (picture(5, rows=5, columns=5), None, "pages"),
    ],
)
def test_images_that_cannot_be_served_are_rejected(
    rig: Rig, image: Image, num_pieces: int | None, reason: str
) -> None:
    rig.open(1, image, num_pieces)
    refusal = rig.next()
    assert isinstance(refusal, FailCommand) and reason in refusal.reason
    rig.close(1, held=False)
    assert not rig.exports.busy and not rig.encoder.num_waiting


def test_images_for_other_weights_are_rejected(rig: Rig) -> None:
    """This happens after an update of the weights of prefill nodes."""
    source = Embeddings(picture(6), 8, PIECE)
    rig.exports.opened(OpenedEvent(1, ID, b"other", Remaining(9.0), source))
    rig.exports.granted(GrantedEvent(1, 0))
    refused = rig.next()
    assert isinstance(refused, FailCommand) and "other weights" in refused.reason


def test_a_draining_node_accepts_no_images(rig: Rig) -> None:
    rig.exports.draining = True
    rig.open(1, picture(6))
    assert isinstance(rig.next(), FailCommand)


def test_a_model_without_an_image_encoder_is_rejected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no image encoder"):
        LoadedEncoder.load(config_of(tmp_path))


def test_several_ranks_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.parallel: 2 ranks is not supported"):
        LoadedEncoder.load(config_of(tmp_path, parallel={"tp": 2}))

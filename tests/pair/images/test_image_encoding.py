"""Images are encoded beside the steps of other requests. The test blocks the encoder, so that a
request is certainly in this stage."""

import threading

import pytest

pytest.importorskip("PIL")

from engine.batch.request import FinishReason
from engine.models.vision import encoder_thread
from tests.pair.images import vision
from tests.pair.images.vision import VisionModel, rig_of, seen
from tests.pair.rig import Size
from tests.support.models.vision import (
    picture,
)

TEXT = list(b"A text to be continued for long.")


class HeldEncoder:
    """An encoder whose calls wait until `release`. `calls`: number of images of each one."""

    def __init__(self, encoder):
        self.calls = []
        self._encoder = encoder
        self._released = threading.Event()
        self.fails = False

    def release(self):
        self._released.set()

    def encode(self, images):
        self.calls.append(len(images))
        assert self._released.wait(60)
        if self.fails:
            self.fails = False
            raise RuntimeError("no memory")
        return self._encoder.encode(images)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return VisionModel(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def rig(model):
    size = Size(prefix_cache=False)
    with rig_of(model, prefill=[], decode=[size], mode="colocated") as rig:
        yield rig
        encoder = rig.decode[0].engine.model.seeing._encoder
        if isinstance(encoder, HeldEncoder):  # a test has failed before it released the thread
            encoder.release()


def held(rig):
    seeing = rig.decode[0].engine.model.seeing
    seeing._encoder = HeldEncoder(seeing._encoder)
    return seeing._encoder


def parts_of(seed):
    return ("What is on this? ", picture(3, 4, seed), "!")


def ask(rig, seed, **options):
    return vision.ask(rig, parts_of(seed), **options)


def greedy(model, seed):
    return model.greedy(parts_of(seed))


def test_other_requests_continue_while_images_are_encoded(rig, model):
    encoder = held(rig)
    running = rig.ask(TEXT, 200)
    rig.until(lambda: running.tokens, "it runs")
    asked = ask(rig, 1)
    rig.until(lambda: encoder.calls, "the image is being encoded")
    later = rig.ask(TEXT[:20], 4)
    before = len(running.tokens)
    rig.until(lambda: later.ended and len(running.tokens) > before + 5, "others go on")
    assert not asked.tokens and rig.decode[0].engine.encoder.num_waiting == 0
    encoder.release()
    rig.run(asked)
    assert asked.tokens == greedy(model, 1)
    assert seen(rig.decode[0]) == (1, 0) and encoder.calls == [1]
    rig.cancel(running)
    rig.run()


def test_images_of_several_requests_are_encoded_in_one_call(rig, model):
    encoder, queue = held(rig), rig.decode[0].engine.encoder
    asked = [ask(rig, seed) for seed in range(4)]
    rig.until(lambda: encoder.calls and queue.num_waiting == 4 - encoder.calls[0], "all wait")
    encoder.release()
    rig.run()
    assert [one.tokens for one in asked] == [greedy(model, seed) for seed in range(4)]
    assert sum(encoder.calls) == 4 and len(encoder.calls) == queue.batches <= 2


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_request_may_end_while_its_image_waits(rig, model, end):
    encoder, queue = held(rig), rig.decode[0].engine.encoder
    first = ask(rig, 1)
    rig.until(lambda: encoder.calls, "the first image is being encoded")
    second = ask(rig, 2, queue_s=0.5 if end == "expired" else 60.0)
    if end == "cancelled":
        rig.until(lambda: queue.num_waiting, "the second image waits")
        rig.cancel(second)
    rig.until(lambda: second.ended, "it ends before its image is encoded")
    encoder.release()
    rig.run()
    assert first.tokens == greedy(model, 1)
    assert encoder.calls == [1] and not second.tokens
    again = ask(rig, 2)
    rig.run(again)
    assert again.tokens == greedy(model, 2)


def test_an_image_that_the_thread_fails_to_encode_is_encoded_by_the_forward(rig, model):
    encoder = held(rig)
    encoder.fails = True
    encoder.release()
    asked = ask(rig, 3)
    rig.run()
    assert asked.tokens == greedy(model, 3)
    assert encoder.calls == [1, 1] and seen(rig.decode[0]) == (1, 0)


@pytest.mark.long
def test_requests_wait_while_the_queue_of_images_is_full(rig, model, monkeypatch):
    monkeypatch.setattr(encoder_thread, "MAX_QUEUED", 1)
    encoder = held(rig)
    asked = [ask(rig, seed) for seed in range(4)]
    rig.until(lambda: encoder.calls, "the first is being encoded")
    encoder.release()
    rig.run()
    assert [one.tokens for one in asked] == [greedy(model, seed) for seed in range(4)]
    assert all(one.reason is not FinishReason.ERROR for one in asked)


@pytest.mark.long
def test_an_image_that_was_evicted_is_encoded_by_the_forward(rig, model):
    """Each image evicts earlier ones."""
    rig.decode[0].engine.model.seeing._most_bytes = 1
    asked = [ask(rig, seed) for seed in range(4)]
    rig.run()
    assert [one.tokens for one in asked] == [greedy(model, seed) for seed in range(4)]
    assert seen(rig.decode[0])[0] >= 4

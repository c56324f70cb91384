"""The publisher of KV events, read over ZMQ like by a router."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from common.config.node import KvEventsConfig
from common.errors import ConfigError
from node.frontend.kv_events import ZmqPublisher, publishing

zmq = pytest.importorskip("zmq", reason="needs pyzmq")
END = (-1).to_bytes(8, "big", signed=True)


def config(directory: Path, **fields: object) -> KvEventsConfig:
    return KvEventsConfig(publisher="zmq", **{"endpoint": f"ipc://{directory}/events", **fields})


class Reader:
    """A subscriber, or a client for replays. Each wait has a deadline."""

    def __init__(self, kind: int, endpoint: str, topic: str = "", *, bind: bool = False) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        if kind == zmq.SUB:
            self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        (self.socket.bind if bind else self.socket.connect)(endpoint)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        self.socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while (parts := self.socket.recv_multipart())[1] != END:
            assert parts[0] == b"" and len(parts) == 3
            found.append((int.from_bytes(parts[1], "big"), parts[2]))
        assert parts == [b"", END, b""]
        return found


@contextlib.asynccontextmanager
async def serving(config: KvEventsConfig):
    with publishing(config) as publisher:
        tasks = [asyncio.ensure_future(each) for each in publisher.background()]
        yield publisher
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def first_number(publisher: ZmqPublisher, reader: Reader) -> int:
    """Return the number of the first batch that arrives: subscriptions take effect some time
    after connect."""
    number = 0
    while not reader.socket.poll(10):
        publisher.publish(b"early")
        number += 1
        assert number < 6000
    return int.from_bytes(reader.socket.recv_multipart()[1], "big")


@pytest.mark.parametrize("connect", [False, True])
def test_a_subscriber_gets_topic_number_and_payload(tmp_path, connect):
    here = config(tmp_path, topic="kv@pod@model", connect=connect)
    with Reader(zmq.SUB, here.endpoint, "kv@", bind=connect) as reader:
        with publishing(here) as publisher:
            number = first_number(publisher, reader)
            publisher.publish(b"last")
            while (parts := reader.socket.recv_multipart())[2] != b"last":
                number += 1
                assert parts == [b"kv@pod@model", number.to_bytes(8, "big"), b"early"]
            assert parts[1] == (number + 1).to_bytes(8, "big")


async def test_missed_batches_are_replayed_from_a_limited_buffer(tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    async with serving(config(tmp_path, replay_endpoint=replay, buffer_steps=4)) as publisher:
        for number in range(6):
            publisher.publish(b"%d" % number)
        with Reader(zmq.DEALER, replay) as reader:
            reader.socket.send_multipart((b"", b"no number"))
            assert await asyncio.to_thread(reader.ask, 0) == [(n, b"%d" % n) for n in range(2, 6)]
            assert await asyncio.to_thread(reader.ask, 5) == [(5, b"5")]
            publisher.publish(b"6")
            assert await asyncio.to_thread(reader.ask, 6) == [(6, b"6")]


async def test_a_subscriber_that_does_not_read_costs_a_limited_number_of_batches(tmp_path):
    payload = bytes(1 << 16)
    replay = f"ipc://{tmp_path}/replay"
    here = config(tmp_path, hwm=4, replay_endpoint=replay, buffer_steps=2000)
    async with serving(here) as publisher:
        with Reader(zmq.SUB, here.endpoint) as slow, Reader(zmq.DEALER, replay) as stuck:
            slow.socket.set_hwm(4)
            first_number(publisher, slow)
            for _ in range(2000):
                publisher.publish(payload)
            num_read = 0
            while slow.socket.poll(100):
                slow.socket.recv_multipart()
                num_read += 1
            assert num_read < 1000
            stuck.socket.send_multipart((b"", bytes(8)))
            await asyncio.to_thread(stuck.socket.poll, 60_000)
            publisher.publish(b"last")  # the publisher does not wait for the stuck reader


def test_events_that_cannot_be_published_are_rejected_at_start(tmp_path, monkeypatch):
    def reason(fields: KvEventsConfig) -> str:
        with pytest.raises(ConfigError) as error:
            with publishing(fields):
                pass
        return str(error.value)

    outside = {"endpoint": "tcp://*:*"}
    assert "readers get the token ids" in reason(config(tmp_path, **outside))
    assert "--kv-events.replay-endpoint tcp://0.0.0.0:0" in reason(
        config(tmp_path, replay_endpoint="tcp://0.0.0.0:0")
    )
    with publishing(config(tmp_path, **outside, insecure=True)):
        pass
    with publishing(config(tmp_path, endpoint="tcp://127.0.0.1:*")):
        pass
    assert "is not available" in reason(config(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        KvEventsConfig(endpoint="udp://127.0.0.1:5")
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert "pip install 'baton-serving[kv-events]'" in reason(config(tmp_path))

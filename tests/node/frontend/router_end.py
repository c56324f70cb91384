"""A router's end of Serve for tests: all messages of the node, in order."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from common import limits
from common.requests.namespace import as_bytes
from protos import decode_pb2, decode_pb2_grpc, request_pb2, sampling_pb2


def submit(
    number: int,
    token_ids: "list[int]",
    max_tokens: int = 4,
    request_id: str = "",
    budget_s: float = 60.0,
    stop_token_ids: "list[int] | None" = None,
    **fields: object,
) -> decode_pb2.ToNode:
    """Return a Submit. fields: of it, or of its request."""
    sampling = sampling_pb2.Sampling(max_tokens=max_tokens, seed=1, stop_token_ids=stop_token_ids)
    of_request = set(request_pb2.Request.DESCRIPTOR.fields_by_name) & {*fields}
    remaining = {"budget_s": budget_s, "queue_s": fields.pop("queue_s", None)}
    request = request_pb2.Request(
        request_id=request_id or f"r{number}",
        token_ids=as_bytes(token_ids),
        sampling=sampling,
        **{name: fields.pop(name) for name in of_request},
    )
    one = decode_pb2.Submit(number=number, request=request, remaining=remaining, **fields)
    return decode_pb2.ToNode(submits=[one])


class RouterEnd:
    """One Serve stream. Use as a context manager: its exit cancels the stream."""

    def __init__(self, address: str, version: int = limits.VERSION) -> None:
        self._channel = grpc.insecure_channel(address)
        self._upward: queue.Queue[decode_pb2.ToNode | None] = queue.Queue()
        self._upward.put(decode_pb2.ToNode(protocol_version=version))
        self.call = decode_pb2_grpc.DecodeNodeStub(self._channel).Serve(
            iter(self._upward.get, None)
        )
        self.tokens: dict[int, list[int]] = {}
        self.groups: dict[int, list[int]] = {}  # numbers of tokens by message
        self.ends: dict[int, tuple[int, str, int]] = {}  # reason, error, code
        self.version = 0  # as the node has reported them
        self.statuses: list[decode_pb2.Status] = []
        # the request that computes alone. 0: another router's. None: none
        self.trials: list[int | None] = []
        self.num_steps = 0
        self.num_beats = 0
        self.cached_tokens: dict[int, int] = {}
        self.predicted: dict[int, tuple[int, int]] = {}  # accepted and rejected, in the last step
        self.retry_after_s: dict[int, float] = {}  # by request that has ended
        self.last_words: tuple[int, str] | None = None
        self.error: grpc.RpcError | None = None
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> "RouterEnd":
        return self

    def __exit__(self, *_: object) -> None:
        self._upward.put(None)
        self.call.cancel()
        self._thread.join(60)
        self._channel.close()

    def send(self, *messages: decode_pb2.ToNode) -> None:
        for message in messages:
            self._upward.put(message)

    def close_upward(self) -> None:
        self._upward.put(None)

    def wait_for(self, what, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(what, timeout_s), (self.tokens, self.ends, self.error)

    def wait_for_end(self, *requests: int) -> None:
        self.wait_for(lambda: all(request in self.ends for request in requests) or self._over)

    def wait_until_over(self, timeout_s: float = 60.0) -> grpc.StatusCode:
        self.wait_for(lambda: self._over, timeout_s)
        return self.call.code()

    def _read(self) -> None:
        try:
            for message in self._messages():
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _messages(self) -> Iterator[decode_pb2.FromNode]:
        yield from self.call

    def _take(self, message: decode_pb2.FromNode) -> None:
        self.version = self.version or message.protocol_version
        if message.HasField("status"):
            self.statuses.append(message.status)
        if message.HasField("last_words"):
            self.last_words = message.last_words.code, message.last_words.sentence
        self.num_beats += message.HasField("engine_heartbeat")
        if message.HasField("quarantine"):
            self.trials.append(message.quarantine.request if message.quarantine.under_way else None)
        if not message.HasField("step"):
            return
        step = message.step
        self.num_steps += 1
        self.retry_after_s |= dict(zip(step.ended, step.retry_after_s, strict=False))
        self.cached_tokens |= dict(zip(step.begun, step.cached_tokens, strict=True))
        reported = zip(step.accepted, step.rejected, strict=True)
        self.predicted |= dict(zip(step.predicted, reported, strict=True))
        for request in dict.fromkeys(step.request):
            self.groups.setdefault(request, []).append(list(step.request).count(request))
        for request, token in zip(step.request, step.token, strict=True):
            assert request not in self.ends
            self.tokens.setdefault(request, []).append(token)
        columns = (step.ended, step.reason, step.error, step.error_code)
        for request, reason, error, code in zip(*columns, strict=True):
            assert request not in self.ends
            self.ends[request] = (reason, error, code)


@contextmanager
def busy(address: str, num_tokens: int = 100) -> Iterator[RouterEnd]:
    """Return a router with one request that generates."""
    with RouterEnd(address) as router:
        router.send(submit(1, [1, 2], num_tokens))
        router.wait_for(lambda: router.tokens)
        yield router

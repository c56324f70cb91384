"""A forward that is still on the device while KV arrives."""

from collections import deque
from collections.abc import Callable

from kvtransfer.messages import ReadsDone
from tests.pair.rig import PairRig, Size

PROMPT = [n * 11 % 300 for n in range(64)]  # four whole pages


class _Pending:
    def __init__(self, stream: "SlowStream") -> None:
        self._stream = stream
        self.done = False

    def wait(self) -> None:
        self._stream.run_until(self)


class SlowStream:
    """A forward stream that starts a forward only when its result is needed. Before each
    forward, `meanwhile` is called for everything that happens while the device is busy."""

    def __init__(self) -> None:
        self._queue: deque[tuple[_Pending, Callable[[], None]]] = deque()
        self.meanwhile: Callable[[], None] = lambda: None

    def submit(self, work: Callable[[], None]) -> _Pending:
        pending = _Pending(self)
        self._queue.append((pending, work))
        return pending

    def run_until(self, awaited: _Pending) -> None:
        while not awaited.done:
            self.meanwhile()
            pending, work = self._queue.popleft()
            work()
            pending.done = True

    def close(self) -> None:
        """Drop operations whose results were not needed."""


def test_kv_never_arrives_in_a_page_that_a_stale_forward_may_still_write(known):
    """Four requests end with a stop token while the next forward is on the device. Another request
    waits for pages. Its granted pages are read before that forward runs.

    Seen failing without the STEP holds of Scheduler.next_batch and finish, and without their check:
    the forward wrote into pages that had been read, and the tokens were wrong.
    """
    ending = [[n, *PROMPT[1:16]] for n in range(4)]  # each will have two pages
    stops = [known.greedy(prompt, 3) for prompt in ending]
    assert all(stop[2] not in stop[:2] for stop in stops)
    streams = [SlowStream(), SlowStream()]
    makers = iter(streams)
    with PairRig(
        known.loaded,
        decode=[Size(num_pages=8, prefix_cache=False)],
        new_token_ratio=0.01,
        make_stream=lambda: next(makers),
    ) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        first = [
            rig.ask(prompt, 30, stop_token_ids=(stop[2],), prefill=[])
            for prompt, stop in zip(ending, stops, strict=True)
        ]
        rig.until(lambda: all(one.tokens for one in first), "the first four run")
        waiting = rig.ask(PROMPT)
        rig.until(lambda: all(one.ended for one in first), "the first four have ended")
        assert decode.in_flight is not None and decode.queue("prealloc") == 1

        def until_read() -> None:
            rig.until(
                lambda: not decode.queue("transfer") or rig.wires.said(ReadsDone),
                "what is granted is read",
                prefill,
            )

        streams[1].meanwhile = until_read
        rig.run()
        assert waiting.tokens == known.greedy(PROMPT, 8)

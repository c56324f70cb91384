"""The CPU's forward stream: one thread, in order, with errors reported to every waiter."""

import ctypes
import threading

import pytest
import torch

from common.errors import EngineFault
from engine.runner.stream import MAX_QUEUED, WorkerStream


@pytest.fixture
def stream():
    made = WorkerStream()
    yield made
    made.close()


def test_work_runs_in_order_on_one_other_thread(stream):
    seen = []
    events = [
        stream.submit(lambda i=i: seen.append((i, threading.get_ident())))
        for i in range(MAX_QUEUED)
    ]
    events[-1].wait()
    assert [i for i, _ in seen] == list(range(MAX_QUEUED))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_an_event_waits_only_for_its_own_work(stream):
    gate = threading.Event()
    first = stream.submit(lambda: None)
    second = stream.submit(lambda: gate.wait(30))
    first.wait()
    gate.set()
    second.wait()


def test_an_error_reaches_only_the_waiters_of_its_work(stream):
    def fail():
        raise KeyError("forward")

    failed, good = stream.submit(fail), stream.submit(lambda: None)
    for _ in range(2):
        with pytest.raises(KeyError, match="forward"):
            failed.wait()
    good.wait()


def test_a_stream_that_is_not_drained_is_an_error(stream):
    started, gate = threading.Event(), threading.Event()

    def hold():
        started.set()
        gate.wait(30)

    stream.submit(hold)
    assert started.wait(30)
    for _ in range(MAX_QUEUED):
        stream.submit(lambda: None)
    with pytest.raises(EngineFault, match="queued"):
        stream.submit(lambda: None)
    gate.set()


def test_close_lets_submitted_work_finish():
    stream, seen = WorkerStream(), []
    for i in range(3):
        stream.submit(lambda i=i: seen.append(i))
    stream.close()
    assert seen == [0, 1, 2]


def test_forwards_compute_with_the_threads_of_the_engine():
    # Seen failing if the forward thread did not inherit the count: OMP_NUM_THREADS's.
    openmp, before = ctypes.CDLL(None), torch.get_num_threads()
    counts = []
    torch.set_num_threads(before + 2)
    try:
        stream = WorkerStream()
        stream.submit(lambda: counts.append(openmp.omp_get_max_threads())).wait()
        stream.close()
    finally:
        torch.set_num_threads(before)
    assert counts == [before + 2]

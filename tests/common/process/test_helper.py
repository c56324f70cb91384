"""Requests to a helper process: the end of one affects no other, and every wait has a limit."""

import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.process.helper import ANSWERED, CRASHED, NO_MEMORY, Answer, Helper, HelperLost, Question

MODULE = "tests.common.process.helper_work"


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper(MODULE, [], num_lanes=2, deadline_s=120.0)
    yield helper
    helper.close()


def ask(helper: Helper, content: bytes, lane: int = 0) -> Answer:
    return helper.ask(lane, Question(content, cpu_s=1, max_bytes=256 << 20))


def running(helper: Helper) -> int:
    assert helper.pid is not None
    return helper.pid


def test_a_request_ends_at_its_limits_and_the_next_one_is_answered(helper):
    assert helper.pid is None, "it was started before the first question"
    large = b"echo " + os.urandom(8 << 20)
    assert ask(helper, large) == Answer(ANSWERED, large[5:])
    first = helper.pid
    assert ask(helper, b"spin").took_too_long
    assert ask(helper, b"fill").code == NO_MEMORY
    assert ask(helper, b"crash").code == -signal.SIGSEGV
    assert ask(helper, b"unknown").code == CRASHED
    assert ask(helper, b"echo again") == Answer(ANSWERED, b"again")
    assert helper.pid == first


def test_a_killed_helper_is_restarted(helper):
    ask(helper, b"echo")
    os.kill(running(helper), signal.SIGKILL)
    with pytest.raises(HelperLost):
        ask(helper, b"echo")
    assert ask(helper, b"echo again").content == b"again"


def test_a_request_ends_with_its_caller(helper, tmp_path):
    """Otherwise the helper would compute an unused result."""
    written = tmp_path / "pid"
    os.mkfifo(written)
    with ThreadPoolExecutor(1) as lane:  # which also starts the helper and must outlive it
        asked = lane.submit(ask, helper, f"orphan {written}".encode())
        with open(written) as file:
            process = os.pidfd_open(int(file.read()))
        os.kill(running(helper), signal.SIGKILL)
        assert isinstance(asked.exception(60), HelperLost)
    wait_for_end(process)


def wait_for_end(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(60_000), "it still runs"
    os.close(process)


@pytest.mark.parametrize("content", [b"spin", b"echo " + bytes(8 << 20)], ids=["answer", "send"])
def test_every_wait_has_a_deadline(content):
    helper = Helper(MODULE, [], num_lanes=1, deadline_s=0.01)
    try:
        with pytest.raises(HelperLost):
            ask(helper, content)
        assert helper.pid is None
    finally:
        helper.close()

"""Log lines that unauthenticated callers can cause are limited, and omitted lines are counted."""

import logging
import threading

import pytest

from common.logs import ThrottledLog
from tests.support.fake_clock import FakeClock

SENTENCE = "client connection rejected"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def log(clock, caplog):
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("tests.throttle")
    return ThrottledLog(logger, most=3, interval_s=10.0, clock=clock)


def test_a_limited_number_of_lines_is_written_and_the_last_one_says_so(log, caplog):
    for number in range(1000):
        log.info(SENTENCE, peer=number)
    assert caplog.messages == [
        f"{SENTENCE} peer=0",
        f"{SENTENCE} peer=1",
        f"{SENTENCE} peer=2 more_left_out_for_s=10",
    ]


def test_the_first_line_of_the_next_interval_has_the_number_of_omitted_ones(log, clock, caplog):
    for number in range(1000):
        log.warning(SENTENCE, peer=number)
    clock.now += 10.0
    caplog.clear()
    log.warning(SENTENCE, peer="x")
    log.warning(SENTENCE, peer="y")
    assert caplog.messages == [f"{SENTENCE} peer=x left_out_before=997", f"{SENTENCE} peer=y"]


def test_lines_within_the_limit_are_unchanged(log, clock, caplog):
    for number in range(3):
        log.info(SENTENCE, peer=number)
        clock.now += 10.0
    assert caplog.messages == [f"{SENTENCE} peer={number}" for number in range(3)]


# Seen failing with only the sentence for a kind: the warning is omitted.
@pytest.mark.parametrize("level, sentence", [("info", "another"), ("warning", SENTENCE)])
def test_each_kind_has_its_own_limit(log, caplog, level, sentence):
    for _ in range(10):
        log.info(SENTENCE, reason="it starts")
    caplog.clear()
    getattr(log, level)(sentence, reason="it differs")
    assert caplog.messages == [f'{sentence} reason="it differs"']


def test_lines_below_the_level_do_not_count(log, caplog):
    caplog.set_level(logging.WARNING)
    for _ in range(10):
        log.info(SENTENCE)
    log.warning(SENTENCE)
    assert caplog.messages == [f"{SENTENCE} "]


def test_exceptions_are_logged_with_tracebacks_within_the_limit(log, caplog):
    for number in range(1000):
        try:
            raise KeyError(number)
        except KeyError as error:
            log.error("a call failed", exc_info=error)
    assert len(caplog.records) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "Traceback" in caplog.text and "KeyError: 2" in caplog.text


def test_threads_share_the_limit(log, caplog):
    def many() -> None:
        for _ in range(200):
            log.info(SENTENCE)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 3

"""The history of ended requests that a node keeps, and its size."""

from node.timings import ProducerTimings, RequestHistory


def stamps(name: str, reason: str = "") -> ProducerTimings:
    return ProducerTimings(name, 7, "", opened=1.0, reason=reason)


def recorder(**bytes_: int) -> RequestHistory[ProducerTimings]:
    return RequestHistory(ProducerTimings, **bytes_)


def test_what_ended_is_found_by_its_id_oldest_first():
    book = recorder()
    for name, reason in (("a", "one"), ("b", "two"), ("a", "three")):
        book.record(stamps(name, reason), failed=False)
    assert [each.reason for each in book.find("a")] == ["one", "three"]
    assert [each.reason for each in book.find("b")] == ["two"]
    assert not list(book.find("c"))
    assert [each.request_id for each in book.last(2)] == ["b", "a"]
    assert len(book) == 3


def test_memory_is_bounded_by_bytes_whatever_is_in_them():
    book = recorder(kept_bytes=10_000, failed_bytes=0)
    for number in range(1000):
        book.record(stamps(str(number), "x" * 200), failed=False)
    assert 20 < len(book) < 50
    assert list(book.find("999")) and not list(book.find("0"))
    book.record(stamps("huge", "x" * 20_000), failed=False)
    assert len(book) == 0


def test_what_failed_is_kept_longer():
    """Seen failing where what leaves is not looked at."""
    book = recorder(kept_bytes=10_000, failed_bytes=10_000)
    book.record(stamps("bad"), failed=True)
    book.record(stamps("good"), failed=False)
    for number in range(1000):
        book.record(stamps(str(number), "x" * 200), failed=False)
    assert list(book.find("bad")) and not list(book.find("good"))
    for number in range(1000):
        book.record(stamps(f"bad {number}", "x" * 200), failed=True)
    assert not list(book.find("bad"))
    assert len(book) < 100

"""The pages of a request, and the ranges in which they are handed over, compared with plain
enumeration."""

import random
from itertools import pairwise

from common.page_tables import PageTables, num_pages_of


def _random_tables(rng: random.Random) -> PageTables:
    windows = [rng.choice((None, None, 1, 3, 16, 17, 40, 100)) for _ in range(rng.randint(1, 4))]
    kinds = tuple(sorted(windows, key=lambda w: w or 0))
    return PageTables(rng.choice((4, 16)), kinds, rng.choice((0, 0, 3)))


def _visible(window: int | None, query: int) -> range:
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def test_a_page_is_live_as_long_as_a_later_query_may_see_it():
    """This includes a query at the last page boundary, from which a prefix may continue."""
    rng = random.Random(1)
    for _ in range(300):
        tables, num_tokens = _random_tables(rng), rng.randrange(200)
        size = tables.page_size
        for table, window in enumerate(tables.windows):
            edge = num_tokens // size * size
            oldest = _visible(window, edge)[0]
            assert tables.live_from(table, num_tokens) == oldest // size
        counted = sum(
            -(-num_tokens // size) - tables.live_from(t, num_tokens)
            for t in range(tables.num_tables)
        )
        counted += tables.state_pages
        assert tables.pages_for(num_tokens) == counted <= tables.pages_to_compute(num_tokens)


def test_over_all_ranges_of_a_hand_off_every_page_occurs_exactly_once():
    """For full hits, prompts of one token and prompts within a window, among others."""
    rng = random.Random(2)
    for _ in range(3000):
        tables = _random_tables(rng)
        size = tables.page_size
        num_tokens = rng.choice((1, size, size + 1, rng.randint(1, 150)))
        prefix = rng.choice((0, num_tokens, rng.randint(0, num_tokens // size) * size))
        cuts = sorted(c for c in range(size, num_tokens, size) if c > prefix and rng.random() < 0.4)
        edges = [prefix, *cuts, num_tokens]
        given = []
        for start, end in pairwise(edges):
            spans = tables.spans(num_tokens, prefix, start, end, last=end == num_tokens)
            given += [(t, page) for t, first, past in spans for page in range(first, past)]
            of_tables = [span for span in spans if span.table < tables.num_tables]
            assert all(past <= -(-end // size) for _, _, past in of_tables)
        promised = tables.handed_over(num_tokens, prefix)
        wanted = [(t, page) for t, first, past in promised for page in range(first, past)]
        assert sorted(given) == sorted(wanted)
        assert len(given) == num_pages_of(promised)
        for table, window in tables.sliding:  # other tokens that the next one sees
            pages = {page for t, page in given if t == table}
            assert pages >= {key // size for key in _visible(window, num_tokens)[:-1]}


def test_a_full_hit_hands_over_only_windows():
    tables = PageTables(16, (None, 20))
    (span,) = tables.spans(50, 50, 50, 50, last=True)
    assert span == (1, 1, 4)
    assert PageTables(16).spans(50, 50, 50, 50, last=True) == ()


def test_the_state_belongs_to_the_last_range_even_if_that_is_empty():
    tables = PageTables(16, state_pages=3)
    assert tables.spans(64, 0, 0, 64, last=False) == ((0, 0, 4),)
    assert tables.spans(64, 0, 64, 64, last=True) == ((1, 0, 3),)
    assert tables.spans(64, 64, 64, 64, last=True) == ((1, 0, 3),)
    assert tables.max_tokens(3 + 5) == 5 * 16
    assert tables.max_tokens(2) == 0


def test_a_full_window_does_not_grow():
    tables = PageTables(16, (None, 33))
    assert tables.growth(0, 10) == 10 + tables.most_live(1)
    assert tables.growth(16 * 100, 10) <= 10 + 2
    for num_tokens in range(400):
        live = tables.num_pages(num_tokens) - tables.live_from(1, num_tokens)
        assert live <= tables.most_live(1)

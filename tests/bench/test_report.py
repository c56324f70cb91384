"""The report: correct plots, and a page without external content."""

from xml.etree import ElementTree

import pytest

from bench.report.page import ReportPage as Report
from bench.report.page import ReportTable, write
from bench.report.svg import HEIGHT, WIDTH, Plot, Series, number, render
from tests.bench.pages import Page


def _drawn(*series, **options):
    return ElementTree.fromstring(render(Plot("t", "x", "y", series, **options)))


def _places(svg):
    return [(float(c.get("cx")), float(c.get("cy"))) for c in svg.findall("circle")]


@pytest.mark.parametrize("log", [False, True])
def test_points_are_in_the_order_of_their_values(log):
    series = Series("a", [1.0, 10.0, 100.0], [0.5, 2.0, 90.0])
    places = _places(_drawn(series, log_x=log, log_y=log))
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)


def test_a_logarithmic_axis_shows_equal_ratios_as_equal_distances():
    places = _places(_drawn(Series("a", [1.0, 4.0, 16.0], [1.0, 1.0, 1.0]), log_x=True))
    (a, _), (b, _), (c, _) = places
    assert b - a == pytest.approx(c - b, abs=0.2)


@pytest.mark.parametrize(
    "xs, ys",
    [
        ([], []),
        ([1.0], [3.0]),
        ([1.0, 2.0], [0.0, 0.0]),
        ([1.0, 2.0], [float("nan"), 2.0]),
        ([0.0, 5.0], [-1.0, 1e9]),
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(xs, ys, log):
    svg = _drawn(Series("a", xs, ys), log_x=log, log_y=log, level=1.0, mark=1.0)
    assert len(svg.findall("circle")) <= len(xs)


def test_zero_is_below_all_others_on_a_logarithmic_axis():
    # Seen failing: a median of 0 ms, of tokens that arrived in pairs, was invisible.
    svg = _drawn(Series("p50", [1.0, 2.0, 3.0], [0.0, 0.5, 80.0]), log_y=True)
    heights = [y for _, y in _places(svg)]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 3
    assert "0" in [text.text for text in svg.findall("text")]


def test_a_single_point_is_in_the_middle():
    ((x, _),) = _places(_drawn(Series("a", [4.0], [3.0])))  # seen failing: on the edge
    assert WIDTH / 3 < x < 2 * WIDTH / 3


def test_a_table_for_a_terminal_is_aligned():
    lines = ReportTable("t", ["load", "n"], [["4 requests/s", "7"], ["x", "1,234"]]).lines()
    assert lines == ["load              n", "4 requests/s      7", "x             1,234"]


def test_a_huge_spread_leaves_space_for_the_points():
    series = Series("a", [1.0, 2.0], [1.0, 1.5], low=[1e-9, None], high=[1e9, None])
    (_, first), (_, second) = _places(_drawn(series, log_y=True))
    assert first - second > HEIGHT / 10


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0"), (0.0254, "0.0254"), (12.34, "12.3"), (123.4, "123"), (45678.0, "45.7k")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_a_page_is_complete_and_escapes_the_text_of_servers(tmp_path):
    evil = "<script>alert(1)</script>"
    report = Report(
        title=evil,
        lead=[evil],
        headline=ReportTable(evil, ["a", "b"], [["1", evil]]),
        warnings=[evil],
        plots=[Plot(evil, evil, evil, [Series(evil, [1.0], [2.0])], note=evil)],
        tables=[ReportTable(evil, ["a", "b"], [["1", evil]], emphasis=frozenset({0}))],
        definitions={evil: evil},
        configuration={"x": None, "y": [1, 2], "z": {"a": 0.5}},
        machine={"gpus": []},
        made="now",
    )
    write(report, tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert len(page.plots) == 1
    assert page.text.count(evil) >= 8
    assert {"1", "–", "1, 2", "a=0.5"} <= set(page.cells)
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]

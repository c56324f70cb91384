"""Ratios with their spread, break-even points with their confidence, the order of repeats."""

import math

import numpy as np
import pytest

from bench.statistics import confidence, crossing, ratio
from bench.systems import ComparedSystem, abba


def test_a_ratio_is_a_geometric_mean_with_students_interval():
    one = ratio([(2.0, 1.0), (8.0, 1.0)])
    assert one.mean == pytest.approx(4.0)
    half = 12.706 * math.log(2) * math.sqrt(2) / math.sqrt(2)  # t(1) x deviation / sqrt(n)
    assert one.low == pytest.approx(4.0 * math.exp(-half), rel=1e-4)
    assert one.verdict == "undecided"


@pytest.mark.parametrize(
    "pairs, verdict",
    [
        ([(1.0, 2.0), (1.01, 2.0), (0.99, 2.0)], "lower"),
        ([(2.0, 1.0), (2.01, 1.0), (1.99, 1.0)], "higher"),
        ([(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)], "undecided"),
        ([(1.0, 2.0)], "undecided"),
    ],
)
def test_a_verdict_needs_repeats_that_agree(pairs, verdict):
    assert ratio(pairs).verdict == verdict


def test_pairs_without_a_value_are_left_out():
    assert ratio([(None, 1.0), (1.0, 0.0), (3.0, 1.0)]).repeats == 1
    assert ratio([(None, None)]) is None


def test_the_break_even_is_where_all_longer_prompts_are_better():
    xs = [64.0, 128.0, 256.0, 512.0]
    found = crossing(xs, [0.5, 0.1, -0.1, -0.4])
    assert (found.below, found.first) == (128.0, 256.0)
    assert found.at == pytest.approx(128 * math.sqrt(2))
    # Better once by chance: only a lasting improvement counts.
    assert crossing(xs, [0.5, -0.1, 0.1, -0.4]).first == 512.0


def test_never_and_everywhere_are_possible():
    xs = [64.0, 128.0]
    never = crossing(xs, [-0.3, 0.2])
    assert (never.at, never.below, never.everywhere) == (None, 128.0, False)
    everywhere = crossing(xs, [-0.3, -0.2])
    assert (everywhere.at, everywhere.below, everywhere.everywhere) == (64.0, None, True)


def test_confidence_decreases_if_repeats_disagree():
    xs = [64.0, 128.0, 256.0]
    agreed = confidence(xs, np.array([[0.5, 0.2, -0.5], [0.51, 0.21, -0.49], [0.5, 0.2, -0.5]]))
    assert (agreed.same, agreed.never) == (1.0, 0.0)
    assert 128 < agreed.low <= agreed.high < 256
    torn = confidence(xs, np.array([[0.5, 0.2, -0.5], [0.5, 0.2, -0.5], [0.5, 0.2, 0.9]]))
    assert torn.same == pytest.approx(20 / 27, abs=0.04)  # fewer than two draws of the third
    assert torn.never == pytest.approx(7 / 27, abs=0.04)
    assert confidence(xs, np.array([[0.5, 0.2, -0.5]] * 2)) is None


def test_systems_alternate_so_that_drift_affects_all_alike():
    a, b = ComparedSystem("a", 0, 2), ComparedSystem("b", 1, 1)
    assert abba((a, b), 3) == [(a, [0]), (b, [0, 1]), (a, [1, 2]), (b, [2])]
    assert abba((a, b), 1) == [(a, [0]), (b, [0])]

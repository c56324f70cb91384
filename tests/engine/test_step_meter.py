"""Step metrics: each step is counted once, in the right bucket, for any times of reports."""

import random

from common import distribution
from common.distribution import LiveHistogram
from engine.loop.step_clock import StepMeter


def test_every_step_is_counted_for_any_times_of_reports():
    """Some times and sizes equal the bounds of buckets."""
    meter = StepMeter()
    seconds, requests = (
        LiveHistogram(distribution.STEP_S),
        LiveHistogram(distribution.BATCH_REQUESTS),
    )
    rng = random.Random(0)
    for step in range(1, 1001):
        taken = rng.choice((*distribution.STEP_S, 0.0, 99.0, rng.random()))
        size = rng.choice((1, 2, 3, 64, 1024, 5000))
        meter.decoded(size, taken)
        seconds.add(taken)
        requests.add(size)
        if step % 301 == 0 or step == 1000:
            counted = meter.distributions()
            assert counted["step_seconds/decode"].counts == seconds.counted().counts
            assert abs(counted["step_seconds/decode"].total - seconds.counted().total) < 1e-6
            assert counted["batch_requests/decode"] == requests.counted()

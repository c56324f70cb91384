"""Sending times, the origin of latencies, and request groups of a load."""

import asyncio
import itertools
import json
import time

import numpy as np
import pytest

from bench.errors import InvalidInput
from bench.statistics import distribution, nearest_rank
from bench.summary import Objectives, gaps_during, summary, warnings
from bench.traffic.load import LoadGenerator, LoadRun, RequestOutcome, poisson, until
from bench.traffic.workload import Lengths, Workload, WorkloadRequest, WorkloadTrace
from tests.bench.stub_openai import until as until_time

JOBS = [WorkloadRequest((number,), 1) for number in range(1, 100)]


class Server:
    """Answers each job after `takes_s`. Records the largest number of concurrent jobs."""

    def __init__(self, takes_s):
        self.takes_s = takes_s
        self.most = self.now = 0
        self.asked = []

    async def ask(self, job, start, due):
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked.append(job)
        await asyncio.sleep(self.takes_s)
        self.now -= 1
        return _outcome(due, chunks=(due + 1.0,), output_tokens=1)


async def _run(drive, server):
    load = LoadGenerator(server.ask)
    async with load.measuring():
        await drive(load)
    return load.run


def _outcome(due=0.0, sent=None, chunks=(), ended=None, **fields):
    sent = due if sent is None else sent
    ended = (chunks[-1] if chunks else sent) if ended is None else ended
    values = {"group": "", "prompt_tokens": 10, "usage_reported": True, **fields}
    return RequestOutcome(due=due, sent=sent, chunks=list(chunks), ended=ended, **values)


async def test_a_closed_loop_keeps_its_number_of_requests_running():
    server = Server(0.01)
    run = await _run(lambda load: load.closed_loop(iter(JOBS), concurrency=3, requests=10), server)
    assert (len(run.outcomes), run.begun, server.most) == (10, 10, 3)
    assert sorted(job.prompt for job in server.asked) == [(n,) for n in range(1, 11)]


async def test_a_closed_loop_ends_at_its_time():
    server = Server(0.01)
    jobs = itertools.cycle(JOBS)
    run = await _run(lambda load: load.closed_loop(jobs, concurrency=2, duration_s=0.5), server)
    assert 2 <= len(run.outcomes) <= 100


async def test_an_open_loop_does_not_wait_for_responses():
    all_under_way = asyncio.Barrier(4)

    async def ask(job, start, due):
        await all_under_way.wait()
        return _outcome(due, chunks=(due + 1.0,), output_tokens=1)

    load = LoadGenerator(ask)
    due = [0.0, 0.01, 0.02, 0.03]
    async with load.measuring():
        await load.open_loop(iter(JOBS), due, max_in_flight=100)
    assert sorted(outcome.due for outcome in load.run.outcomes) == due


async def test_no_request_is_sent_before_it_is_due():
    async def ask(job, start, due):
        return _outcome(due, time.perf_counter() - start, error="not asked")

    load = LoadGenerator(ask)
    async with load.measuring():
        due = [0.0054 * number for number in range(1, 11)]  # uvloop sleeps whole milliseconds
        await load.open_loop(iter(JOBS), due, max_in_flight=100)
    assert len(load.run.outcomes) == 10
    assert min(outcome.late for outcome in load.run.outcomes) >= 0


async def test_a_request_delayed_by_the_concurrency_limit_is_late_and_its_latency_starts_when_due():
    async def ask(job, start, due):
        sent = time.perf_counter() - start
        await until_time(start + sent + 0.05)
        ended = time.perf_counter() - start
        return RequestOutcome("", 1, due, sent, chunks=[ended], ended=ended)

    load = LoadGenerator(ask)
    async with load.measuring():
        await load.open_loop(iter(JOBS), [0.0, 0.0, 0.0], max_in_flight=1)
    _, second, third = load.run.outcomes
    assert second.late >= 0.05
    assert third.late >= 0.1
    assert third.ttft >= 0.15  # not the 0.05 of the server
    stats = summary(load.run, Objectives())
    assert stats["late"] >= 2
    assert "late" in [warned.kind for warned in warnings("run", load.run, stats)]


async def test_an_interrupted_load_keeps_its_results_so_far():
    answered = asyncio.Event()

    async def ask(job, start, due):
        if job.prompt == (1,):
            return _outcome(chunks=(0.1,), output_tokens=1)
        answered.set()
        await asyncio.Event().wait()

    load = LoadGenerator(ask)

    async def work():
        async with load.measuring():
            await load.closed_loop(iter(JOBS), concurrency=1)

    task = asyncio.create_task(work())
    await answered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = summary(load.run, Objectives())
    assert (stats["completed"], stats["cancelled"], stats["complete"]) == (1, 1, False)


def test_poisson_arrivals_have_their_rate_and_depend_only_on_the_seed():
    times = list(until(poisson(50.0, 3), count=5000, duration_s=None))
    assert times == list(until(poisson(50.0, 3), count=5000, duration_s=None))
    assert times != list(until(poisson(50.0, 4), count=5000, duration_s=None))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # exponential: as large as its mean
    assert max(until(poisson(50.0, 3), count=None, duration_s=2.0)) < 2.0


def test_a_summary_follows_from_its_outcomes():
    run = LoadRun(ended=9.0, begun=4)
    run.outcomes = [
        _outcome(0.0, chunks=(1.0, 1.5, 2.5), output_tokens=5),  # 4 tokens after the first: 0.375
        _outcome(1.0, chunks=(1.2, 1.3), chunk_tokens=[2, 3], output_tokens=5, ended=1.4),
        _outcome(2.0, sent=2.5, error="status 429"),
        _outcome(3.0, chunks=(5.0,), output_tokens=1, ended=5.0),
    ]
    stats = summary(run, Objectives({"ttft": 1.0, "itl": 0.6}))
    assert (stats["requests"], stats["completed"]) == (4, 3)
    assert stats["errors"] == {"status 429": 1}
    assert stats["wall_s"] == 5.0
    assert stats["requests_per_s"] == 0.6
    assert (stats["input_tokens_per_s"], stats["output_tokens_per_s"]) == (6.0, 2.2)
    assert stats["ttft"] | {"p90": 0, "p99": 0} == {
        "n": 3, "mean": 1.066667, "p50": 1.0, "p90": 0, "p99": 0, "max": 2.0
    }  # fmt: skip
    assert (stats["itl"]["n"], stats["itl"]["max"]) == (3, 1.0)
    assert (stats["tpot"]["n"], stats["tpot"]["max"]) == (2, 0.375)
    assert stats["tpot"]["mean"] == pytest.approx((0.375 + 0.1 / 3) / 2, abs=1e-6)
    assert stats["e2e"]["max"] == 2.5
    assert (stats["late"], stats["lateness"]["max"]) == (1, 0.5)
    # The first misses itl, the third failed, the last misses ttft.
    assert stats["goodput"]["requests_per_s"] == 0.2
    assert stats["goodput"]["share"] == 0.25
    assert stats["tokens_per_chunk"] == pytest.approx(11 / 6, abs=0.01)


def test_percentiles_have_their_number_of_samples():
    assert distribution([]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max")) | {"n": 0}
    hundred_and_one = distribution(float(n) for n in range(101))
    assert [hundred_and_one[p] for p in ("n", "p50", "p90", "p99", "max")] == [101, 50, 90, 99, 100]
    assert nearest_rank([3.0, 1.0, 2.0], 0.99) == 3.0
    assert nearest_rank([float(n) for n in range(1, 201)], 0.99) == 198.0


def test_gaps_under_a_prefill_are_those_that_overlap_it():
    reader = _outcome(chunks=(0.0, 1.0, 2.0, 3.0, 4.0))
    long = [_outcome(1.2, chunks=(1.3,)), _outcome(1.25, chunks=(2.5, 9.0)), _outcome(8, ended=9)]
    assert gaps_during([reader], long) == [1.0, 1.0]
    assert gaps_during([reader], []) == []


def test_a_client_that_is_the_bottleneck_is_reported():
    run = LoadRun(outcomes=[_outcome(chunks=(1.0,), output_tokens=1)], begun=1, ended=1.0)
    run.client_cpu, run.client_lag = 0.95, distribution([0.0])
    (warned,) = warnings("x", run, summary(run, Objectives()))
    assert (
        warned.text
        == "x: the client used 95% of a core: the client may be the limit, not the server"
    )
    run.client_cpu, run.client_lag = 0.1, distribution([0.5])
    (warned,) = warnings("x", run, summary(run, Objectives()))
    assert "timers came 500 ms late" in warned.text
    run.client_lag = distribution([0.001])
    assert warnings("x", run, summary(run, Objectives())) == []


def test_prompts_depend_on_the_seed_and_share_only_the_prefix_of_their_group():
    work = Workload(Lengths.parse("40-60"), Lengths.fixed(7), prefix_groups=3, prefix_tokens=20)
    jobs = list(itertools.islice(work.jobs(1), 60))
    assert jobs == list(itertools.islice(work.jobs(1), 60))
    assert {len(job.prompt) for job in jobs} <= set(range(40, 61))
    assert len({len(job.prompt) for job in jobs}) > 5
    assert len({job.prompt[:20] for job in jobs}) == 3
    assert len({job.prompt[20:30] for job in jobs}) == 60
    assert {job.max_tokens for job in jobs} == {7}
    other = {job.prompt[:20] for job in itertools.islice(work.jobs(2), 60)}
    assert not other & {job.prompt[:20] for job in jobs}


def test_a_mixture_has_its_shares_and_marks_the_long_prompts():
    work = Workload(Lengths.parse("mix:8=3,64=1"), Lengths.fixed(1), long_tokens=64)
    jobs = list(itertools.islice(work.jobs(5), 2000))
    assert {len(job.prompt) for job in jobs} == {8, 64}
    assert sum(job.group == "long" for job in jobs) / 2000 == pytest.approx(0.25, abs=0.04)
    assert all((job.group == "long") == (len(job.prompt) == 64) for job in jobs)


def test_a_lognormal_has_its_median_and_its_maximum():
    lengths = Lengths.parse("lognormal:100,0.5,300")
    rng = np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert np.median(drawn) == pytest.approx(100, rel=0.05)
    assert max(drawn) == lengths.largest == 300


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "9-3", "x", "mix:", "mix:3", "mix:0=1", "lognormal:3", "mix:3=-1"]
)
def test_an_invalid_length_is_rejected(text):
    with pytest.raises(InvalidInput):
        Lengths.parse(text)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "speed=1", "ttft=0", "ttft=1,,"])
def test_an_invalid_objective_is_rejected(text):
    with pytest.raises(InvalidInput):
        Objectives.parse(text)


def test_a_trace_has_its_own_times_and_shared_blocks(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 520, "output_length": 3, "hash_ids": [7]},
        {"timestamp": 1500, "input_length": 100, "output_length": 2},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    trace = WorkloadTrace.read(file)
    assert trace.times() == [0.0, 0.5, 2.0]
    first, second, third = trace.jobs(1)
    assert [len(job.prompt) for job in (first, second, third)] == [520, 100, 600]
    assert [job.max_tokens for job in (first, second, third)] == [3, 2, 5]
    assert first.prompt[:512] == third.prompt[:512]
    assert first.prompt[:50] != second.prompt[:50]
    assert trace.largest == 605


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"input_length": 3}', '{"input_length": 0, "output_length": 1}']
)
def test_an_invalid_line_of_a_trace_is_reported_by_number(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_length": 3, "output_length": 1}\n' + line)
    with pytest.raises(InvalidInput, match="line 2"):
        WorkloadTrace.read(file)
